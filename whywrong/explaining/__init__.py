"""Why a step is wrong: mutations of the recorded program, and hypotheses, compared with what was observed."""
