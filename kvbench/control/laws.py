"""The laws by the name that a scenario gives them."""

from kvbench.control.bucket import Bucket
from kvbench.control.feedback import QueueFeedback
from kvbench.control.law import Open
from kvbench.control.learned import Learned
from kvbench.control.pid import Pid

LAWS: dict[str, type[Open]] = {"none": Open, "bucket": Bucket, "pid": Pid, "queue_feedback": QueueFeedback, "learned": Learned}
