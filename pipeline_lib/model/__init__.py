"""A model folder before torch looks at it: which tensors it holds, and whether it is a model that can be trained."""
