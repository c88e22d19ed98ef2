"""Every command with invalid values: two lines with what is wrong and what to do, exit status 2."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from support.common import TINY_MODEL, Command, skip_figures
from support.photos import save_photo
from vitral import api, weights
from vitral.data.preprocess import Preprocessing
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.model_io import ModelConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, a timm checkpoint, images, and files that are neither."""
    folder = tmp_path_factory.mktemp("hostile")
    for index in range(8):
        save_photo(folder / "photos" / ("ants", "bees")[index % 2] / f"{index}.jpg", (index % 2 * 200, 90, 90), index)
    Image.new("L", (64, 48), 128).save(folder / "photo.png")
    (folder / "empty").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "thesis.txt").write_text("precious")
    (folder / "notes.txt").write_text("one\ntwo\n")
    (folder / "nothing.txt").write_text("")
    (folder / "binary.txt").write_bytes(bytes(range(128, 256)))
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched)
        api.train("digits", epochs=1, out=folder / "run", **TINY_MODEL)
    config = ViTConfig(image_size=(32, 32), patch_size=8, num_classes=3, width=192, depth=1, heads=3)
    preprocessing = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    model_config = ModelConfig(
        architecture=config, preprocessing=preprocessing, classes=("a", "b", "c"), trained_on="x", epoch=1
    )
    weights.write((ViT(config), model_config), folder / "model.safetensors", to="timm")
    return folder


# A valid command, then invalid endings of it between bars. Indented lines continue the line above.
INVALID = """
predict run photo.png | --top 0 | --top -1 | --top x | --top '' | --top 1.5 | --labels missing.txt | --labels photos
    | --labels nothing.txt | --labels notes.txt | --labels binary.txt | --threads 0 | --threads -1
    | --threads 1000000 | --engine fp8 | --engine fp4 | --device tpu | --device gpu | --out predictions.docx
    | --out photos
    | --out '' | --jsn
predict | NOTHING | missing photo.png | run | run empty | '' photo.png | empty photo.png
    | notes.txt photo.png | missing.onnx photo.png | hf: photo.png | model.safetensors photo.png --heads 0
    | model.safetensors photo.png --heads -1 | model.safetensors photo.png --heads 7
evaluate run | --max-error 0 | --max-error 1 | --max-error -1 | --max-error nan | --max-error x | --ood missing
    | --ood empty | --ood digits | --ood '' | --split all | --data missing | --data empty
    | --data photos | --data notes.txt | --figures notes.txt | --calibrate --false-positive-rate 0
    | --calibrate --false-positive-rate 1.5 | --labels missing.txt
evaluate | NOTHING | missing | '' | empty | photo.png | model.safetensors | model.safetensors --data photos
    | model.safetensors --calibrate
compare | NOTHING | run | run missing | missing run | run run --data missing | run run --split x
    | run model.safetensors
report run --fast | --out photos | --out missing/report.html | --out '' | --data missing | --ood missing
    | --ood empty
report | NOTHING | missing | empty | model.safetensors
bench run --seconds 0.01 | --images 0 | --images -5 | --images 3 | --images x | --data missing | --data empty
    | --threads 0 | --threads -1 | --threads 1000000 | --batch-sizes 0 | --batch-sizes -1 | --batch-sizes 100000000
    | --seconds -1 | --seconds nan | --seconds inf | --seconds x
bench | NOTHING | missing | empty | model.safetensors
embed run photo.png --out vectors.npy | --out vectors.docx | --out vectors | --out photos | --heads 0
    | --out notes.txt/x.npy
embed | NOTHING | run | run photo.png | run missing.png --out v.npy | run empty --out v.npy
    | missing photo.png --out v.npy
explain run photo.png | --top 0 | --top -3 | --top 2 --target 3 | --method magic | --target zebra | --target 99
    | --target '' | --method attention --layer 0 | --method attention --layer 99 | --method attention --layer -1
    | --method attention --head 0 | --method attention --head 99 | --layer 1 | --head 1 | --method gradcam --head 1
    | --colormap rainbow | --fusion sum | --out notes.txt | --labels missing.txt | --labels notes.txt
    | --faithfulness missing | --faithfulness digits --images 0 | --faithfulness digits --images -1
    | --faithfulness digits --head 1 | --faithfulness digits --split all | --faithfulness empty
explain | NOTHING | run | missing photo.png | run empty | run.onnx photo.png
walk photo.png --model run | --layer 0 | --layer 99 | --layer -1 | --head 0 | --head 99 | --lang fr
    | --labels missing.txt | --out walk.pdf | --out missing/walk.html | --out notes.txt/walk.md | --out ''
walk --model run | NOTHING | missing.png | photos | notes.txt | ''
walk photo.png | --model missing | --model empty
figures run | --count 0 | --count -1 | --count x | --images missing.png | --images empty | --images notes.txt
    | --out notes.txt
figures | NOTHING | missing
summary B/16 | --num-classes 0 | --num-classes -1 | --num-classes x | --levels 0 | --levels -1 | --image-size 0
    | --image-size 225 | --image-size -16 | --patch-size 0 | --patch-size -1 | --width 0 | --width 770 | --depth 0
    | --heads 0 | --channels 0 | --dropout 1 | --dropout -1 | --dropout nan | --drop-path 2 | --norm-eps 0
    | --registers -1 | --pooling most | --mlp-width 0 | --layer-scale nan | --nonsense 1
plan B/16 | --gpus 0 | --gpus -1 | --gpus x | --batch-size 0 | --batch-size -1 | --grad-accum 0 | --gpu abacus
    | --gpu-memory 0
    | --gpu-memory -1 | --gpu-memory nan | --gpus-per-node 0 | --network 0 | --network -1 | --network nan | --mfu 0
    | --mfu 2 | --mfu nan | --images 0 | --images -1 | --epochs 0 | --epochs -1 | --epochs nan | --strategy x
    | --precision fp8 | --optimizer lion | --num-classes 0
plan | NOTHING | B/61 | ''
export run | --images 0 | --images -1 | --images x | --data missing | --data empty | --out photos | --to tflite
    | --precision fp8 | --labels missing.txt | --out notes.txt/model.onnx
export | NOTHING | missing | empty | model.safetensors | photo.png
serve run | --port -1 | --port 65536 | --port x | --host no.such.host.invalid | --name '' | --name 'a b'
    | --name a --name b | --keys missing.txt | --keys photos | --keys nothing.txt | --keys binary.txt
    | --labels missing.txt | --threads 0 | --threads 1000000 | --engine fp8 | --log xml | --max-batch 0
    | --max-queue 0
    | --batch-wait-ms -1 | --batch-wait-ms nan | --max-connections 0 | --max-images 0 | --request-timeout-s -1
    | --max-megapixels 0 | --device gpu
serve | NOTHING | missing --port 0 | empty --port 0 | run run --port 0
convert model.safetensors there --to timm | --heads 0 | --heads -1 | --heads 7 | --image-size 0 | --image-size -32
    | --image-size 33 | --image-size 64 | --to keras
convert | NOTHING | missing there | model.safetensors | model.safetensors full --to vitral | photo.png there
    | empty there | notes.txt there | '' there | model.safetensors there.npz --to vitral
    | model.safetensors notes.txt/x --to vitral
push run hf:me/mine --dry-run | --folder full | --folder notes.txt | --heads 3
push | NOTHING | run | run mine --dry-run | run hf: --dry-run | run hf:me --dry-run | run '' --dry-run
    | missing hf:me/mine --dry-run
train digits | --epochs 0 | --epochs -1 | --epochs 1.5 | --epochs '' | --batch-size 0 | --batch-size -1
    | --seed -1 | --seed x
    | --optim.lr 0 | --optim.lr -1 | --optim.lr nan | --optim.lr inf | --optim.name adam | --optim.weight-decay -1
    | --data.validation 1 | --data.validation -1 | --data.validation nan | --grad-accum 0
    | --keep-checkpoints -1 | --keep-checkpoints 0 | --checkpoint-minutes -1 | --checkpoint-minutes nan | --ema 2
    | --ema -1 | --loss l2
    | --augment.mixup -1 | --augment.mixup nan | --augment.repeat 0 | --augment.jitter -1 | --on-nan pray
    | --model.width 0 | --model.depth 0 | --model.heads 0 | --model.patch-size 0 | --model.image-size 0
    | --model.dropout 1 | --preset Q/16 | --init-from missing | --init-from empty | --init-from photo.png
    | --out notes.txt
    | --out full | --recipe missing.toml | --recipe notes.txt | --recipe photos | --compare
    | --variant magic | --variant distilled
    | --heads 0 | --heads x | --device gpu | --tta many | --init-from model.safetensors --heads 0
    | --init-from model.safetensors --preset Ti/16 | --init-from model.safetensors --compare --seeds 0 | --seeds 2
train | NOTHING | '' | missing | empty | notes.txt | photo.png | full | --resume missing | --resume empty
    | --resume '' | --resume | --recipe
doctor | NOTHING | missing | notes.txt | empty | '' | photos --init-from missing | photos --init-from empty
    | photos --fix-list missing/list.csv | photos --fix-list full
probe | NOTHING | photos | photos --init-from missing | photos --init-from empty
    | missing --init-from model.safetensors
    | empty --init-from model.safetensors | photos --init-from model.safetensors --out plot.docx
    | photos --init-from model.safetensors --heads 0 | photos --init-from model.safetensors --heads 7
data | fetch | fetch moon | where | where moon | where digits mnist | list digits | sing | --sing | pack
    | pack missing
    | pack empty | pack digits | pack photos --image-size 0 | pack photos --image-size 7 | pack photos --workers -1
    | pack photos --unreadable 2 | pack photos --unreadable -1 | pack photos --out full
    | pack photos --init-from missing
recipes | show | show moon | show mnist digits | sing | --sing | ''
models | show | show moon | where | sing | --sing
completion | NOTHING | tcsh | bash zsh
demo | --out full | --out notes.txt | now | --epochs 3
vitral | sing | '' | --sing
"""
ROWS = INVALID.replace("\n    |", " |").strip().splitlines()
COMMAND_LINES = [
    f"{'' if row[0] == 'vitral' else row[0]} {'' if invalid == 'NOTHING' else invalid}".strip()
    for row in (line.split(" | ") for line in ROWS)
    for invalid in row[1:]
]


@pytest.fixture
def working_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run in the folder; no failing command may change it."""
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    yield folder
    assert sorted(folder.rglob("*")) == before


def check_two_lines(err: str) -> tuple[str, str]:
    lines = [line for line in err.splitlines() if not line.startswith("  ") or line.startswith("       ")]  # notes
    assert len(lines) == 2, err
    what, hint = lines
    assert what.startswith("error: "), err
    assert hint.startswith("       "), err
    assert len(what) > len("error: ") + 8, err
    assert len(hint.strip()) > 8, err
    assert "Errno" not in err
    assert "Traceback" not in err
    return what.removeprefix("error: "), hint.strip()


@pytest.mark.parametrize("words", COMMAND_LINES)
def test_invalid_values_are_reported_in_two_lines(working_folder: Path, words: str, command: Command) -> None:
    code, _, err = command(*shlex.split(words))
    assert code == 2
    check_two_lines(err)


@pytest.mark.parametrize(
    "words",
    ["predict run photo.png --top 0", pytest.param("bench run --images 0", marks=pytest.mark.slow), "data sing"],
)
def test_invalid_values_in_a_separate_process(working_folder: Path, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vitral", *shlex.split(words)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 2
    check_two_lines(done.stderr)
