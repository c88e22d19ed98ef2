"""The methods by name."""

from __future__ import annotations

from vitral.explain.attention import attention
from vitral.explain.by_captum import integrated_gradients, shapley, smooth_gradient
from vitral.explain.gradcam import gradcam
from vitral.explain.method import Method
from vitral.explain.occlusion import occlusion
from vitral.explain.relevance import relevance
from vitral.explain.rollout import rollout

METHODS: dict[str, Method] = {
    "attention": Method(
        name="attention",
        about="where one layer, or one head of it, looked",
        heat=attention,
        unit="share of attention, 0…1",
        needs="trace",
        by_class=False,
    ),
    "rollout": Method(
        name="rollout",
        about="attention of all layers multiplied",
        heat=rollout,
        unit="share of the answer, 0…1",
        needs="trace",
        by_class=False,
    ),
    "relevance": Method(
        name="relevance",
        about="attention of all layers, where it raised the class's logit",
        heat=relevance,
        unit="relevance, from 0 up",
        needs="gradients",
    ),
    "gradcam": Method(
        name="gradcam",
        about="the last layer's patches in the direction that raises the class's logit",
        heat=gradcam,
        unit="weighted activation, from 0 up",
        needs="gradients",
    ),
    "occlusion": Method(
        name="occlusion",
        about="what the class loses against the others when a part is covered",
        heat=occlusion,
        unit="log-odds lost, any sign",
        needs="answers",
        signed=True,
    ),
    "integrated-gradients": Method(
        name="integrated-gradients",
        about="gradients on the way from gray to the picture (captum)",
        heat=integrated_gradients,
        by_captum=True,
        unit="logits a pixel, any sign; they add up to the logit's difference from gray",
        needs="gradients",
        fine=True,
        signed=True,
    ),
    "smooth-gradient": Method(
        name="smooth-gradient",
        about="how steeply the logit changes with each pixel (captum)",
        heat=smooth_gradient,
        by_captum=True,
        unit="slope, from 0 up",
        needs="gradients",
        fine=True,
    ),
    "shapley": Method(
        name="shapley",
        about="each patch's fair share of the logit, by sampling (captum)",
        heat=shapley,
        by_captum=True,
        unit="logits a patch, any sign; over the patches they add up to the logit's difference from gray",
        needs="answers",
        signed=True,
        slow=True,
    ),
}
DEFAULT = ("rollout", "relevance")  # quick, and the second knows the class
