"""All methods by name."""

from __future__ import annotations

from vitral.explain.attention import attention
from vitral.explain.by_captum import integrated_gradients, shapley, smoothgrad
from vitral.explain.gradcam import gradcam
from vitral.explain.method import Method
from vitral.explain.occlusion import occlusion
from vitral.explain.relevance import relevance
from vitral.explain.rollout import rollout

_METHODS = (
    Method(
        name="attention",
        summary="attention of one layer or head",
        function=attention,
        unit="attention weight, 0 to 1",
        needs="trace",
        is_class_specific=False,
    ),
    Method(
        name="rollout",
        summary="product of the attention of all layers",
        function=rollout,
        unit="share of the pooled feature, 0 to 1",
        needs="trace",
        is_class_specific=False,
    ),
    Method(
        name="relevance",
        summary="attention of all layers that raised the class's logit",
        function=relevance,
        unit="relevance, 0 or more",
        needs="gradients",
    ),
    Method(
        name="gradcam",
        summary="patches of the last layer, weighted by the gradient of the class's logit",
        function=gradcam,
        unit="weighted activation, 0 or more",
        needs="gradients",
    ),
    Method(
        name="occlusion",
        summary="drop of the class's log-odds when a region is covered",
        function=occlusion,
        unit="drop of the log-odds, any sign",
        needs="logits",
        is_signed=True,
    ),
    Method(
        name="integrated-gradients",
        summary="gradients integrated from the mean colour to the image (captum)",
        function=integrated_gradients,
        needs_captum=True,
        unit="logits per pixel, any sign; their sum is the difference of the logit from an image of the mean colour",
        needs="gradients",
        is_pixelwise=True,
        is_signed=True,
    ),
    Method(
        name="smoothgrad",
        summary="gradient magnitude averaged over noisy copies (captum)",
        function=smoothgrad,
        needs_captum=True,
        unit="gradient magnitude, 0 or more",
        needs="gradients",
        is_pixelwise=True,
    ),
    Method(
        name="shapley",
        summary="Shapley value of each patch, by sampling (captum)",
        function=shapley,
        needs_captum=True,
        unit="logits per patch, any sign; their sum is the difference of the logit from an image of the mean colour",
        needs="logits",
        is_signed=True,
        is_slow=True,
    ),
)
METHODS: dict[str, Method] = {method.name: method for method in _METHODS}
DEFAULT = ("rollout", "relevance")  # both are fast, and relevance depends on the class
