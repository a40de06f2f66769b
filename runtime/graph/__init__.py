"""One graph for each size of step: buckets, recording, capture, replay, audit."""
