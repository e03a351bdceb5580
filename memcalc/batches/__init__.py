"""Sequence lengths of a data set, and the micro-batches that samplers and collators make of them."""

from memcalc.batches.lengths import Lengths, parse_lengths
from memcalc.batches.makers import BUDGETED, SEED, MicroBatches, Sampling, Shape, longest_of, make

__all__ = ["BUDGETED", "SEED", "Lengths", "MicroBatches", "Sampling", "Shape", "longest_of", "make", "parse_lengths"]
