"""The known sets."""

from vitral.errors import VitralError


def run(words: list[str]) -> int:
    from vitral import data

    action, names = (words or ["list"])[0], words[1:]
    if action == "list" and not names:
        for entry in data.catalogue():
            state = (
                "no files needed"
                if entry.paths == []
                else "in the cache"
                if entry.cached
                else f"{entry.size / 1e6:.0f} MB to fetch"
            )
            print(f"{entry.name:<15}{entry.description}  ({state})")
    elif action == "fetch" and names:
        for name in names:
            found = data.fetch(name, progress=True)
            print(f"{name}: {found.source}")
    elif action == "where" and len(names) == 1:
        paths = data.where(names[0])
        if paths is None:
            raise VitralError(f"{names[0]} is not on this machine", f"vitral data fetch {names[0]}")
        print("\n".join(map(str, paths)) or f"{names[0]} comes with scikit-learn and needs no files")
    else:
        print("usage: vitral data list                the known sets, and which are here")
        print("       vitral data fetch NAME …        get them now")
        print("       vitral data where NAME          the files of one")
        return 0 if set(words) & {"-h", "--help"} else 2
    return 0
