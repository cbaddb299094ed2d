"""Twelve reference programs each with an independent port, its defects and its clean runs.

`cases()` yields them all, with at most 10 defects a program; `cases(aside=True)` yields the defects kept aside instead.
Which ones are aside was chosen by kind, before labkit had run on them (but for one trial on q01).
"""

from benchmark import base
from benchmark.heldout_1 import part_one, part_three, part_two  # noqa: F401

PROGRAMS = base.members(__name__)

ASIDE = {
    "q01": "sigmoid_without_input",
    "q02": "sink_of_kv_head projection_transposed",
    "q03": "softmax_over_tokens aux_without_expert_count aux_coefficient",
    "q04": "scores_not_scaled state_of_chunk_before gate_is_sigmoid",
    "q05": "row_sum_over_rows no_root learning_rate_not_relative",
    "q06": "temperature_divides temperature_without_exp label_of_next norm_not_differentiated grad_of_temperature_itself",
    "q07": "divided_by_deviation log_determinant_doubled log_base_two shares_over_components",
    "q08": "first_tracks_covariance noise_squared_again noise_only_on_diagonal log_determinant_of_factor",
    "q09": "own_sample_in_transmittance widths_of_next_bin ray_length_missing absorption_first_order depth_not_normalised suffix_with_own_sample "
    "softplus_not_differentiated",
    "q10": "bias_of_other_side state_of_two_before reset_before_bias recurrent_bias_of_n_missing sides_exchanged mean_over_padding_too",
    "q11": "nibbles_signed halves_instead_of_pairs largest_without_abs scale_of_whole_tensor scale_eps_large clamped_to_seven_bits "
    "unsigned_eight_bits last_four_of_group zero_correction_missing first_groups_scale scale_of_row_above bias_before_clamp_missing "
    "clamped_below_at_zero",
    "q12": "last_block_reads_previous heads_strided attention_vectors_swapped edge_sign total_over_heads exp_in_bf16 "
    "mean_of_connected_only norm_eps gamma_beta_swapped mean_not_taken_off relu_for_elu",
}

for program in PROGRAMS.values():
    names = set(ASIDE[program.id].split())
    assert names <= {d.name for d in program.defects}, (program.id, names)
    program.extra["aside"] = [d for d in program.defects if d.name in names]
    program.defects = [d for d in program.defects if d.name not in names]
