"""Which method for which head: written forms, costs, measures of error, and the plan that chooses."""
