"""How long a step takes: work counted from the same terms as memory, at rates fitted on published throughput."""

from memcalc.timing.rates import Rates, rates_for
from memcalc.timing.times import Times, step_times

__all__ = ["Rates", "Times", "rates_for", "step_times"]
