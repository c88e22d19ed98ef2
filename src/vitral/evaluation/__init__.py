"""Evaluation of models: metrics with confidence intervals, calibration, OOD detection, robustness, comparison."""
