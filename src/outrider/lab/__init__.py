"""What experiments share: workloads, recording, scoring, replay at measured costs, statistics, drawings."""
