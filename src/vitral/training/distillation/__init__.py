"""Learning from a teacher.

`backend.py` adds the teacher's predictions to the loss of a run with labels (`vitral train --distill.teacher`).
`trainer.py`, `setup.py` and `feature_cache.py` train on the teacher's features without labels (`vitral distill`).
"""
