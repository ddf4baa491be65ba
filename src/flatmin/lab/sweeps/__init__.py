"""Many runs: jobs, runners, the local pool and Ray. May import training and what training may."""
