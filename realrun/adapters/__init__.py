"""The algorithms in the loops of other libraries: Accelerate, Lightning, torchtitan, Transformers.

Each module needs the extra of its name: `pip install '.[accelerate]'`.
"""
