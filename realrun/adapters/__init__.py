"""The algorithms in the training loops of other libraries: Accelerate, Lightning, Transformers.

Each module needs the extra of its name: `pip install '.[accelerate]'`.
"""
