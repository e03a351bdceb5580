"""What autograd keeps and what a training step holds, measured without a GPU on the real classes."""
