def l2(module):
    """Return the sum of the squares of the weights, without biases."""
    return sum((each**2).sum() for name, each in module.named_parameters() if name.endswith("weight"))
