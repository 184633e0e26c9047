import torch


def weights(module):
    """Return the weights of the module without biases and norms, which have one dimension."""
    return [each for each in module.parameters() if each.dim() > 1]


def l2(module):
    """Return half the sum of the squares; its gradients are the weights."""
    return sum((each**2).sum() for each in weights(module)) / 2


def orthogonality(module):
    """Return how far the shorter side of each matrix is from an orthonormal basis: |W W' - 1|^2."""
    total = 0.0
    for each in weights(module):
        matrix = each.flatten(1)
        matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
        total = total + ((matrix @ matrix.T - torch.eye(len(matrix), device=matrix.device)) ** 2).sum()
    return total
