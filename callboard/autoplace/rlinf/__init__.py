"""RLinf configs as problems: what they say of their job, their cluster and their costs."""
