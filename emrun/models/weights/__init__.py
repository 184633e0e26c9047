"""The weights of a module: saved, loaded to begin with, exchanged for evaluations, the same on all ranks.

Read `module_weights` first: what `TorchModel` owns. Then `saving`: which tensors of a module are its weights, how a
checkpoint gets them and how they come back, tied tensors once. The other files answer a question each:

- `loadable`: could a resume load what the run saves? It is asked before the first batch, and before each checkpoint.
- `init_from`: which weights does a new run begin with? `matching` compares the tensors of a file with those of the
  module, and says why one is not loaded.
- `averages`: with which weights does an evaluation run, and how are they exchanged with those that are trained?
  `batch_norm` calculates the running statistics of BatchNorm for them. A new way of averaging is a hook that sets
  `TorchModel.evaluation_weights`, as AverageWeights does.
- `over_ranks`: are the weights of all ranks the same?

May import: what `models` may.
"""
