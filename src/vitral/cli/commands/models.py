"""The models that come with vitral."""

import json

from vitral import bundled as box
from vitral.errors import unknown


def run(words: list[str]) -> int:
    action, names = (words or ["list"])[0], words[1:]
    if action in ("show", "where") and len(names) == 1:
        name = names[0].removeprefix(box.PREFIX)
        if name not in box.names():
            raise unknown("model in the box", name, box.names())
        print((box.ROOM / name / "README.md").read_text(encoding="utf-8") if action == "show" else box.ROOM / name)
    elif action == "list" and not names:
        for name in box.names():
            print(f"{name:<15}{described(name)}")
        print("\nvitral predict NAME photo.jpg asks one; vitral box show NAME prints its card.")
    else:
        print("usage: vitral box                     the models that come with vitral")
        print("       vitral box show NAME           the card of one: how good it is, what it is not for")
        print("       vitral box where NAME          its folder")
        return 0 if set(words) & {"-h", "--help"} else 2
    return 0


def described(name: str) -> str:
    """One line: what it tells apart, how well, how large it is."""
    folder = box.ROOM / name
    card, test = (json.loads((folder / file).read_text("utf-8")) for file in ("model/config.json", "test.json"))
    few = ", ".join(card["classes"][:3])
    size = (folder / "model" / "weights.safetensors").stat().st_size
    return (
        f"{len(card['classes'])} classes ({few} …): {test['top1']:.2%} of {test['images']:,} test images; "
        f"{'×'.join(map(str, card['preprocessing']['image_size']))} pixels, {size / 1e6:.1f} MB"
    )
