"""The report's confusion matrix, the pictures behind its cells, and the pictures that the model fails on."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitral.explain import METHODS, scaled
from vitral.inference.predictor import Predictor
from vitral.reporting.figures.training import glowing, shown
from vitral.reporting.html.markup import note, percent, text
from vitral.reporting.html.report_data import Material

MOST_CLASSES = 40  # in the matrix; of more, those with the most mistakes
A_CELL = 12  # pictures behind a cell
MOST_BYTES = 2_500_000  # of pictures behind cells, as they stand in the file
SIDE = 112  # pixels of a picture's longer side
GALLERY = 12  # worst mistakes, and least sure


@dataclass(frozen=True, kw_only=True)
class Cells:
    """The confusion matrix's classes, and pictures behind its cells: (picture, probability of what was said)."""

    classes: list[int]
    pictures: list[str]
    cells: dict[str, list[tuple[int, float]]]
    pixelated: bool

    @classmethod
    def of(cls, material: Material) -> Cells:
        counts = np.array(material.found.confusion)
        wrong = counts.sum(axis=0) + counts.sum(axis=1) - 2 * counts.diagonal()
        chosen = list(range(len(counts)))
        if len(counts) > MOST_CLASSES:
            chosen = sorted(np.argsort(-wrong, kind="stable")[:MOST_CLASSES].tolist())
        p = material.predictor.card.calibration.probabilities(material.logits)
        sure, said = p.max(dim=1)
        labels, images = material.split.labels, material.split.images
        mistakes = (said != labels).nonzero().flatten().tolist()
        rights = (said == labels).nonzero().flatten().tolist()
        # the surest mistakes first, then the least sure right answers: those are worth the room
        order = sorted(mistakes, key=lambda i: -sure[i].item()) + sorted(rights, key=lambda i: sure[i].item())
        kept: list[str] = []
        room, within = MOST_BYTES, set(chosen)
        cells: dict[str, list[tuple[int, float]]] = {}
        for index in order:
            true, answer = int(labels[index]), int(said[index])
            behind = cells.setdefault(f"{true},{answer}", [])
            if len(behind) >= (A_CELL if true != answer else A_CELL // 2) or not {true, answer} <= within:
                continue
            picture = embedded(shown(images[index]))
            if (room := room - len(picture)) < 0:
                break
            behind.append((len(kept), round(sure[index].item(), 4)))
            kept.append(picture)
        return cls(
            classes=chosen,
            pictures=kept,
            cells={name: behind for name, behind in cells.items() if behind},
            pixelated=max(images.shape[2:]) <= 64,
        )

    def for_page(self, material: Material) -> dict[str, Any]:
        counts = np.array(material.found.confusion)
        names = [figures.name for figures in material.found.per_class]
        wrong = counts.sum(axis=0) + counts.sum(axis=1) - 2 * counts.diagonal()
        return {
            "classes": names,
            "images": counts.sum(axis=1).tolist(),
            "cells": self.cells,
            "pictures": self.pictures,
            "pixelated": self.pixelated,
            "orders": {
                "given": self.classes,
                "name": sorted(self.classes, key=lambda k: names[k].casefold()),
                "mistakes": sorted(self.classes, key=lambda k: -int(wrong[k])),
                "together": [self.classes[place] for place in side_by_side(counts[np.ix_(self.classes, self.classes)])],
            },
        }


def side_by_side(counts_KK: np.ndarray[Any, Any]) -> list[int]:
    """An order in which classes that are taken for each other stand near: along the graph's slowest vibration.

    (The eigenvector of the second smallest eigenvalue of its Laplacian: Fiedler, 1973.)
    """
    weights = (counts_KK + counts_KK.T).astype(float)
    np.fill_diagonal(weights, 0)
    weights += 1e-3  # classes that are never confused belong somewhere too
    laplacian = np.diag(weights.sum(axis=1)) - weights
    _, vectors = np.linalg.eigh(laplacian)
    return np.argsort(vectors[:, min(1, len(vectors) - 1)], kind="stable").tolist()


def confusion(material: Material, cells: Cells) -> str:
    found = material.found
    counts = np.array(found.confusion)
    names = [figures.name for figures in found.per_class]
    off = counts[~np.eye(len(counts), dtype=bool)]
    most = max(int(off.max(initial=0)), 1)
    long = max((len(names[k]) for k in cells.classes), default=0) > 4
    style = ' class="across"' if long else ""
    heads = "".join(
        f'<th scope="col" data-said="{k}"{style} title="{text(names[k])}">{text(names[k])}</th>' for k in cells.classes
    )
    body = []
    for true in cells.classes:
        line = "".join(cell(int(counts[true, said]), true, said, most, names) for said in cells.classes)
        body.append(
            f'<tr data-is="{true}"><th scope="row" title="{text(names[true])}">{text(names[true])}</th>{line}</tr>'
        )
    orders = (
        ("given", "as trained"),
        ("name", "by name"),
        ("mistakes", "most mistakes first"),
        ("together", "alike side by side"),
    )
    options = "".join(f'<option value="{value}">{name}</option>' for value, name in orders)
    less = "" if len(cells.classes) == len(names) else f" The {len(cells.classes)} classes with the most mistakes."
    classes = "".join(
        f'<tr><th scope="row">{text(f.name)}</th>'
        + "".join(f'<td data-value="{v:.6f}">{percent(v)}</td>' for v in (f.precision, f.recall, f.f1))
        + f'<td data-value="{f.images}">{f.images:,}</td></tr>'
        for f in found.per_class
    )
    columns = "".join(
        f'<th scope="col"><button type="button">{name}</button></th>'
        for name in ("class", "precision", "recall", "F1", "images")
    )
    return (
        '<p class="screen"><label>Order of the classes <select id="order" autocomplete="off">'
        f"{options}</select></label> <span class=soft>Choose a number to see the pictures behind it.</span></p>"
        f'<div class="pair beside"><div class="wide"><table class="matrix" id="matrix"><caption>Rows: what it is. '
        f"Columns: what the model said.{less}</caption><thead>"
        f"<tr><th></th>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
        '<div id="cell" class="screen" aria-live="polite"><p class="soft">Pictures appear here.</p></div></div>'
        f'<details{" open" if len(names) <= MOST_CLASSES else ""}><summary>Class by class</summary><div class="wide">'
        f'<table class="sortable"><thead><tr>{columns}</tr></thead><tbody>{classes}</tbody></table></div></details>'
    )


def cell(count: int, true: int, said: int, most: int, names: Sequence[str]) -> str:
    if not count:
        return f'<td data-said="{said}"></td>'
    what = f"{names[true]}, recognised" if true == said else f"{names[true]}, taken for {names[said]}"
    style = "right" if true == said else f"m{min(1 + int(4.999 * (count / most) ** 0.5), 5)}"
    return (
        f'<td data-said="{said}" class="{style}"><button type="button" data-cell="{true},{said}" aria-pressed="false" '
        f'aria-label="{text(what)}: {count}">{count}</button></td>'
    )


def galleries(material: Material) -> str:
    """The surest mistakes and the least sure answers, each beside what the model looked at."""
    p = material.predictor.card.calibration.probabilities(material.logits)
    sure, said = p.max(dim=1)
    wrong = (said != material.split.labels).nonzero().flatten()
    worst = wrong[sure[wrong].argsort(descending=True)][:GALLERY]
    unsure = sure.argsort()[:GALLERY]
    written = ""
    for title, places in (("The surest mistakes", worst), ("The least sure answers", unsure)):
        if len(places):
            written += f'<h3>{title}</h3><ul class="pictures">{"".join(gallery(material, places, p))}</ul>'
    return written + note("Beside each picture: what spoke for the class that the model said (class relevance).")


def gallery(material: Material, places: Tensor, p_NK: Tensor) -> Iterable[str]:
    images, names = material.split.images[places], material.predictor.classes
    said = p_NK[places].argmax(dim=1)
    heats = relevance(material.predictor, images, said)
    small = " class=pixels" if max(images.shape[2:]) <= 64 else ""
    for image, heat, answer, index in zip(images, heats, said.tolist(), places.tolist(), strict=True):
        true = int(material.split.labels[index])
        right = answer == true
        told = f"{names[answer]} {percent(p_NK[index, answer].item(), 1)}"
        is_so = "right" if right else f"is {names[true]} ({percent(p_NK[index, true].item(), 1)})"
        yield (
            f'<li class="two"><img{small} src="{embedded(shown(image))}" alt="{text(f"an image of {names[true]}")}"> '
            f'<img{small} src="{embedded(glowing(shown(image), heat))}" alt="where the model looked">'
            f'<div>{text(told)}, <span class="{"soft" if right else "wrong"}">{text(is_so)}</span></div></li>'
        )


def relevance(predictor: Predictor, images_NCHW: Tensor, said_N: Tensor) -> np.ndarray[Any, Any]:
    """N H W in 0…1; a few images at a time, for the gradients of all attention are kept."""
    images = predictor.card.preprocessing.normalise(images_NCHW.to(predictor.hardware.device))
    pairs = zip(images.split(4), said_N.to(images.device).split(4), strict=True)
    heat = torch.cat([METHODS["relevance"](predictor.model, some, said) for some, said in pairs])
    found: np.ndarray[Any, Any] = scaled(heat).cpu().numpy()
    return found


def embedded(picture_HW3: np.ndarray[Any, Any]) -> str:
    """A picture inside the page: small ones exactly, photographs as JPEG."""
    image, file = Image.fromarray(picture_HW3), io.BytesIO()
    if max(image.size) <= 64:
        gray = bool((picture_HW3[..., :1] == picture_HW3).all())
        (image.convert("L") if gray else image).save(file, "PNG")
        kind = "png"
    else:
        image.thumbnail((SIDE, SIDE))
        image.save(file, "JPEG", quality=82)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
