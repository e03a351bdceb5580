"""Charts: an answer in, a picture out; :mod:`memcalc.report.charts.picture` has the formats, other modules draw."""
