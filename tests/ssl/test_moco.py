"""MoCo v3's contrastive loss against explicit loops, and which views are compared."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from support.pretraining import draw_batch, random_images, tiny_method
from vitral.ssl.moco import MoCo, MoCoConfig, contrastive_loss


def unit_vectors(*shape: int, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def info_nce(queries: Tensor, keys: Tensor, temperature: float, first: int) -> tuple[float, float]:
    """Equation 1 for every query and every global view but its own, one exponential after the other."""
    B, V, _ = queries.shape
    N, G, _ = keys.shape
    losses, hits = [], []
    for b in range(B):
        for view in range(V):
            for key in range(G):
                if view == key:
                    continue
                similarities = [float(queries[b, view].double() @ keys[n, key].double()) for n in range(N)]
                total = sum(math.exp(similarity / temperature) for similarity in similarities)
                losses.append(-math.log(math.exp(similarities[first + b] / temperature) / total))
                hits.append(max(similarities) == similarities[first + b])
    return 2 * temperature * B * sum(losses) / len(losses), B * sum(hits) / len(hits)


@pytest.mark.parametrize(("B", "V", "N", "G", "first"), [(4, 2, 4, 2, 0), (3, 5, 6, 2, 3), (3, 4, 3, 1, 0)])
def test_the_loss_equals_explicit_loops(B: int, V: int, N: int, G: int, first: int) -> None:
    queries, keys = unit_vectors(B, V, 6), unit_vectors(N, G, 6, seed=1)
    loss, score = contrastive_loss(queries, keys, 0.2, first)
    expected_loss, expected_score = info_nce(queries, keys, 0.2, first)
    assert float(loss) == pytest.approx(expected_loss, rel=1e-5)
    assert float(score) == pytest.approx(expected_score)


def test_the_loss_is_that_of_the_authors_code_for_two_views() -> None:
    """Their loss is the sum of both directions; here it is the mean."""
    (q1, q2), (k1, k2) = unit_vectors(5, 2, 6).unbind(1), unit_vectors(5, 2, 6, seed=1).unbind(1)
    theirs = sum(F.cross_entropy(q @ k.T / 0.3, torch.arange(5)) * 2 * 0.3 for q, k in ((q1, k2), (q2, k1)))
    loss, _ = contrastive_loss(torch.stack([q1, q2], 1), torch.stack([k1, k2], 1), 0.3)
    torch.testing.assert_close(loss / 5, theirs / 2)


def test_equal_embeddings_have_the_loss_of_guessing() -> None:
    same = unit_vectors(1, 1, 6).expand(8, 2, 6)
    loss, _ = contrastive_loss(same, same, 0.2)
    assert float(loss) / 8 == pytest.approx(2 * 0.2 * math.log(8), rel=1e-5)


def test_perfect_matches_have_almost_no_loss_and_full_accuracy() -> None:
    keys = torch.eye(6)[:, None].expand(6, 2, 6)
    loss, score = contrastive_loss(keys, keys, 0.05)
    assert float(loss) < 1e-5
    assert float(score) == 6


def test_a_query_is_not_compared_with_the_key_of_its_own_view() -> None:
    queries, keys = unit_vectors(4, 2, 6), unit_vectors(4, 2, 6, seed=1)
    queries.requires_grad_()
    loss, _ = contrastive_loss(queries[:, :1].expand(-1, 2, -1), keys, 0.2)
    alone, _ = contrastive_loss(queries[:, :1], keys, 0.2)  # only the key of view 1
    changed = keys.clone()
    changed[:, 0] = unit_vectors(4, 6, seed=2)
    assert not torch.equal(contrastive_loss(queries[:, :1].expand(-1, 2, -1), changed, 0.2)[0], loss)
    assert torch.equal(contrastive_loss(queries[:, :1], changed, 0.2)[0], alone)


def test_similarities_are_computed_in_fp32_under_autocast() -> None:
    queries, keys = unit_vectors(16, 2, 64), unit_vectors(16, 2, 64, seed=1)
    expected, _ = contrastive_loss(queries, keys, 0.05)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(contrastive_loss(queries, keys, 0.05)[0], expected)


def test_queries_have_a_predictor_and_keys_have_none() -> None:
    method = tiny_method("moco")
    assert isinstance(method, MoCo)
    global_views, _ = draw_batch(method, random_images())
    features = method.student.features(global_views.flatten(0, 1))
    projected = method.student.projector(features)
    torch.testing.assert_close(method.keys(global_views).flatten(0, 1), F.normalize(projected, dim=1))
    queries = F.normalize(method.predictor(projected), dim=1)
    torch.testing.assert_close(method.queries(global_views).flatten(0, 1), queries)


def test_local_views_are_queries_only() -> None:
    method = tiny_method("moco")
    assert isinstance(method, MoCo)
    global_views, local_views = draw_batch(method, random_images())
    queries = torch.cat([method.queries(global_views), method.queries(local_views)], dim=1)
    expected = contrastive_loss(queries, method.keys(global_views), 0.2)
    torch.testing.assert_close(method(global_views, local_views), expected)


def test_an_untrained_model_has_about_the_initial_loss() -> None:
    method = tiny_method("moco")
    loss, _ = method(*draw_batch(method, random_images(count=64)))
    assert loss.item() / 64 == pytest.approx(2 * 0.2 * math.log(64), rel=0.3)
    assert method.initial_loss == pytest.approx(2 * 0.2 * math.log(1024))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0), ("temperature", math.inf), ("temperature", math.nan), ("momentum", 1.0),
        ("momentum", -0.1), ("hidden_width", 0), ("width", 0),
    ],
)  # fmt: skip
def test_invalid_options_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^moco\.{name} must be .*, got {value}$"):
        MoCoConfig(**{name: value})
