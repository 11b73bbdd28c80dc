//! What real models rely on: which ops keep their shards, what moves when it must, and what is an error.

use Redistribution::{AllGather, AllReduce, AllToAll, Keep, ReduceScatter, Slice, Spread};
use bonfire_placement::{
    Op, Operand, PartialOp, Placement, PlacementError, Plan, Redistribution, Reduction, Role, Shares, Yield,
    redistribute,
};

const SUM: Placement = Placement::Partial { op: PartialOp::Sum };

fn shard<const N: usize>(dim: usize, lengths: [usize; N]) -> Placement {
    Placement::shard(dim, lengths)
}

fn try_plan(op: &Op, operands: &[(&Placement, &[usize])], world_size: usize) -> Result<Plan, PlacementError> {
    let operands: Vec<Operand<'_>> = operands.iter().map(|&(placement, shape)| Operand { placement, shape }).collect();
    op.plan(&operands, &Shares::Equal, world_size)
}

/// How each operand moves and what the outputs are, on 2 ranks.
fn plan(op: &Op, operands: &[(&Placement, &[usize])]) -> (Vec<Redistribution>, Vec<Placement>) {
    let plan = try_plan(op, operands, 2).expect("a plan");
    let moves = operands.iter().zip(&plan.inputs).map(|((from, _), to)| redistribute(from, to).expect("a way"));
    (moves.collect(), plan.outputs)
}

fn elementwise() -> Op {
    Op::Aligned { blocked: Vec::new(), num_outputs: 1 }
}

fn linear(dims: &[usize]) -> Op {
    Op::Batched { dims: dims.to_vec(), roles: vec![Role::Split, Role::Whole], outputs: vec![Yield::Split] }
}

fn weight_gradient(dims: &[usize]) -> Op {
    Op::Batched { dims: dims.to_vec(), roles: vec![Role::Split, Role::Split], outputs: vec![Yield::Sum] }
}

/// Runs views and reductions one after another; each must keep its input where it is.
fn chain(start: Placement, shape: &[usize], steps: &[(Op, &[usize], Placement)]) {
    let (mut placement, mut from) = (start, shape);
    for (op, to, expected) in steps {
        assert_eq!(plan(op, &[(&placement, from)]), (vec![Keep], vec![expected.clone()]), "{op:?}");
        (placement, from) = (expected.clone(), to);
    }
}

#[test]
fn batch_norm_keeps_its_shard_through_swap_and_reshape_and_sums_statistics_once() {
    let mean = Op::Reduce { dim: 1, reduction: Reduction::Mean };
    chain(
        shard(0, [3, 2]),
        &[5, 3, 2, 4],
        &[
            (Op::Permute { axes: vec![1, 0, 2, 3] }, &[3, 5, 2, 4], shard(1, [3, 2])),
            (Op::Reshape { to: vec![3, 40] }, &[3, 40], shard(1, [24, 16])),
            (mean, &[3, 1], SUM),
            (Op::Reshape { to: vec![1, 3, 1, 1] }, &[1, 3, 1, 1], SUM),
        ],
    );
    // The batch meets its mean: one all-reduce of `[1, channels, 1, 1]`, and the batch stays.
    let operands: [(&Placement, &[usize]); 2] = [(&shard(0, [3, 2]), &[5, 3, 2, 4]), (&SUM, &[1, 3, 1, 1])];
    assert_eq!(plan(&elementwise(), &operands), (vec![Keep, AllReduce], vec![shard(0, [3, 2])]));
}

#[test]
fn batch_of_one_is_replicated_by_batch_norm() {
    for from in [Placement::Local, Placement::Replicate] {
        let (_, outputs) = plan(&Op::Reduce { dim: 0, reduction: Reduction::Mean }, &[(&from, &[1, 3])]);
        assert_eq!(outputs, [Placement::Replicate]);
    }
}

#[test]
fn a_mean_is_the_sum_of_the_ranks_sums_over_the_whole_length() {
    let (_, outputs) = plan(&Op::ReduceAll { reduction: Reduction::Mean }, &[(&shard(0, [3, 2]), &[5])]);
    assert_eq!(outputs, [SUM]);
    let whole_length = 5.0;
    assert_eq!((1.0 + 2.0 + 3.0) / whole_length + (4.0 + 5.0) / whole_length, 3.0); // the mean of means is 3.25
}

#[test]
fn attention_keeps_the_batch_sharded() {
    let batch = shard(0, [3, 2]);
    chain(
        batch.clone(),
        &[5, 7, 6],
        &[
            (Op::Reshape { to: vec![5, 7, 2, 3] }, &[5, 7, 2, 3], batch.clone()),
            (Op::Permute { axes: vec![0, 2, 1, 3] }, &[5, 2, 7, 3], batch.clone()),
            (Op::Reshape { to: vec![10, 7, 3] }, &[10, 7, 3], shard(0, [6, 4])),
            (Op::Reshape { to: vec![5, 2, 7, 3] }, &[5, 2, 7, 3], batch.clone()),
            (Op::Permute { axes: vec![0, 1, 3, 2] }, &[5, 2, 3, 7], batch.clone()),
        ],
    );
    let scores = plan(&Op::Matmul, &[(&batch, &[5, 2, 7, 3]), (&batch, &[5, 2, 3, 7])]);
    assert_eq!(scores, (vec![Keep, Keep], vec![batch.clone()]));
    let softmax = Op::Aligned { blocked: vec![3], num_outputs: 1 };
    assert_eq!(plan(&softmax, &[(&batch, &[5, 2, 7, 7])]), (vec![Keep], vec![batch.clone()]));
    // One mask for all.
    let masked = plan(&elementwise(), &[(&batch, &[5, 2, 7, 7]), (&Placement::Local, &[1, 1, 7, 7])]);
    assert_eq!(masked, (vec![Keep, Spread], vec![batch]));
}

#[test]
fn merging_batch_and_time_and_splitting_them_again_keeps_the_batch_sharded() {
    chain(
        shard(0, [3, 2]),
        &[5, 4, 6],
        &[
            (Op::Reshape { to: vec![20, 6] }, &[20, 6], shard(0, [12, 8])),
            (Op::Reshape { to: vec![5, 4, 6] }, &[5, 4, 6], shard(0, [3, 2])),
        ],
    );
    // Rows of the merged dim that do not end on whole sequences are exchanged for some that do.
    let split = plan(&Op::Reshape { to: vec![5, 4, 6] }, &[(&shard(0, [10, 10]), &[20, 6])]);
    assert_eq!(split, (vec![AllToAll], vec![shard(0, [3, 2])]));
    // The inner of two merged dims is scattered over the rows of the outer.
    let inner = plan(&Op::Reshape { to: vec![20, 6] }, &[(&shard(1, [2, 2]), &[5, 4, 6])]);
    assert_eq!(inner, (vec![AllToAll], vec![shard(0, [12, 8])]));
    let nothing_in_common = plan(&Op::Reshape { to: vec![5, 4] }, &[(&shard(0, [2, 2]), &[4, 5])]);
    assert_eq!(nothing_in_common, (vec![AllGather], vec![Placement::Replicate]));
}

#[test]
fn data_parallel_linear_keeps_the_batch_and_its_weight_gradient_is_partial() {
    let batch = shard(0, [3, 2]);
    for activation in [&Placement::Local, &Placement::Fill, &Placement::Replicate, &SUM, &batch] {
        let (_, outputs) = plan(&linear(&[0]), &[(activation, &[5, 3]), (&Placement::Local, &[3, 4])]);
        assert_eq!(outputs, std::slice::from_ref(&batch), "{activation}");
    }
    let forward = plan(&linear(&[0]), &[(&Placement::Replicate, &[5, 3]), (&Placement::Replicate, &[3, 4])]);
    assert_eq!(forward.0, [Slice, Keep]);

    let backward = plan(&weight_gradient(&[0]), &[(&batch, &[5, 3]), (&batch, &[5, 4])]);
    assert_eq!(backward, (vec![Keep, Keep], vec![SUM]));
    // The same as autodiff writes it: x^T dy.
    let transposed = plan(&Op::Permute { axes: vec![1, 0] }, &[(&batch, &[5, 3])]);
    assert_eq!(transposed, (vec![Keep], vec![shard(1, [3, 2])]));
    let backward = plan(&Op::Matmul, &[(&shard(1, [3, 2]), &[3, 5]), (&batch, &[5, 4])]);
    assert_eq!(backward, (vec![Keep, Keep], vec![SUM]));
    // And with a gradient of ones that no rank has stored.
    let backward = plan(&Op::Matmul, &[(&shard(1, [3, 2]), &[3, 5]), (&Placement::Fill, &[5, 4])]);
    assert_eq!(backward, (vec![Keep, Spread], vec![SUM]));
    // The gradient of the input: dy w^T.
    let backward = plan(&Op::Matmul, &[(&batch, &[5, 4]), (&Placement::Replicate, &[4, 3])]);
    assert_eq!(backward, (vec![Keep, Keep], vec![batch]));
}

#[test]
fn a_bias_gradient_is_summed_dim_by_dim_and_reduced_by_nobody() {
    chain(
        shard(0, [3, 2]),
        &[5, 7, 4],
        &[
            (Op::Reduce { dim: 0, reduction: Reduction::Sum }, &[1, 7, 4], SUM),
            (Op::Reduce { dim: 1, reduction: Reduction::Sum }, &[1, 1, 4], SUM),
            (Op::Reshape { to: vec![4] }, &[4], SUM),
            (Op::Expand { to: vec![2, 4] }, &[2, 4], SUM),
            (Op::Permute { axes: vec![1, 0] }, &[4, 2], SUM),
            (Op::ReduceAll { reduction: Reduction::Mean }, &[1], SUM),
        ],
    );
}

#[test]
fn only_sums_and_means_of_a_partial_sum_stay_partial() {
    let max = Placement::Partial { op: PartialOp::Max };
    let replicated = (vec![AllReduce], vec![Placement::Replicate]);
    for (from, reduction) in
        [(&SUM, Reduction::Max), (&SUM, Reduction::Whole), (&max, Reduction::Max), (&max, Reduction::Sum)]
    {
        assert_eq!(plan(&Op::Reduce { dim: 0, reduction }, &[(from, &[5, 3])]), replicated);
        assert_eq!(plan(&Op::ReduceAll { reduction }, &[(from, &[5, 3])]), replicated);
    }
    assert_eq!(plan(&Op::Reshape { to: vec![15] }, &[(&max, &[5, 3])]), (vec![Keep], vec![max]));
    assert_eq!(plan(&elementwise(), &[(&SUM, &[5, 3])]), replicated);
}

#[test]
fn a_batch_by_its_own_transpose_gathers_the_transpose() {
    let x_by_xt = plan(&Op::Matmul, &[(&shard(0, [3, 2]), &[5, 3]), (&shard(1, [3, 2]), &[3, 5])]);
    assert_eq!(x_by_xt, (vec![Keep, AllGather], vec![shard(0, [3, 2])]));
    let xt_by_x = plan(&Op::Matmul, &[(&shard(1, [3, 2]), &[3, 5]), (&shard(0, [3, 2]), &[5, 3])]);
    assert_eq!(xt_by_x, (vec![Keep, Keep], vec![SUM]));
}

#[test]
fn batch_features_and_members_of_two_are_told_apart() {
    let (rows, cols, shape): (_, _, &[usize]) = (shard(0, [1, 1]), shard(1, [1, 1]), &[2, 2]);
    let whole = Placement::Replicate;
    for (lhs, rhs, moves, output) in [
        (&rows, &whole, [Keep, Keep], &rows),
        (&rows, &rows, [Keep, AllGather], &rows),
        (&rows, &cols, [Keep, AllGather], &rows),
        (&cols, &rows, [Keep, Keep], &SUM),
        (&cols, &whole, [Keep, Slice], &SUM),
        (&cols, &cols, [Keep, AllToAll], &SUM),
        (&whole, &cols, [Keep, Keep], &cols),
        (&whole, &rows, [Slice, Keep], &SUM),
        (&whole, &whole, [Slice, Keep], &rows),
        (&SUM, &SUM, [ReduceScatter, AllReduce], &rows),
        (&SUM, &rows, [ReduceScatter, Keep], &SUM),
    ] {
        assert_eq!(
            plan(&Op::Matmul, &[(lhs, shape), (rhs, shape)]),
            (moves.to_vec(), vec![output.clone()]),
            "{lhs} x {rhs}"
        );
    }
    let transposed = plan(&Op::Permute { axes: vec![1, 0] }, &[(&rows, shape)]);
    assert_eq!(transposed, (vec![Keep], vec![cols]));
}

#[test]
fn of_two_sharded_factors_the_smaller_one_moves_unless_the_left_one_has_rows() {
    let matmul = |lhs: (&Placement, &[usize]), rhs: (&Placement, &[usize])| plan(&Op::Matmul, &[lhs, rhs]);
    let (k_of_lhs, cols_of_rhs) = (shard(1, [2, 2]), shard(1, [10, 10]));
    let large_rhs = matmul((&k_of_lhs, &[3, 4]), (&cols_of_rhs, &[4, 20]));
    assert_eq!(large_rhs, (vec![AllGather, Keep], vec![cols_of_rhs]));
    let large_lhs = matmul((&k_of_lhs, &[30, 4]), (&shard(1, [1, 1]), &[4, 2]));
    assert_eq!(large_lhs, (vec![Keep, AllToAll], vec![SUM]));
    let other_lengths = matmul((&shard(1, [3, 1]), &[3, 4]), (&shard(0, [2, 2]), &[4, 20]));
    assert_eq!(other_lengths, (vec![AllToAll, Keep], vec![SUM]));
    // Two batch sizes in one graph: the activation's rows stay, whatever the other's size.
    let two_batches = matmul((&shard(0, [50, 50]), &[100, 8]), (&shard(1, [2500, 2500]), &[8, 5000]));
    assert_eq!(two_batches, (vec![Keep, AllGather], vec![shard(0, [50, 50])]));
}

#[test]
fn a_batch_dim_other_than_0_stays_sharded() {
    // An LSTM's `[time, batch, features]`.
    let batch = shard(1, [3, 2]);
    let forward = plan(&linear(&[0, 1]), &[(&batch, &[7, 5, 3]), (&Placement::Replicate, &[3, 4])]);
    assert_eq!(forward, (vec![Keep, Keep], vec![batch.clone()]));
    let backward = plan(&weight_gradient(&[0, 1]), &[(&batch, &[7, 5, 3]), (&batch, &[7, 5, 4])]);
    assert_eq!(backward, (vec![Keep, Keep], vec![SUM]));
    // The cell state learns it from the gates, and a time step is sliced out without a move.
    let gates = plan(&elementwise(), &[(&shard(0, [3, 2]), &[5, 4]), (&Placement::Local, &[5, 4])]);
    assert_eq!(gates, (vec![Keep, Spread], vec![shard(0, [3, 2])]));
    let time_step = Op::Aligned { blocked: vec![0], num_outputs: 1 };
    assert_eq!(plan(&time_step, &[(&batch, &[7, 5, 3])]), (vec![Keep], vec![batch]));
}

#[test]
fn a_dim_of_length_1_or_0_is_never_sharded() {
    for batch in [1, 0] {
        let whole = (vec![Spread, Keep], vec![Placement::Replicate]);
        let x: [usize; 2] = [batch, 3];
        assert_eq!(plan(&linear(&[0]), &[(&Placement::Local, &x), (&Placement::Replicate, &[3, 4])]), whole);
        assert_eq!(plan(&Op::Matmul, &[(&Placement::Local, &x), (&Placement::Replicate, &[3, 4])]), whole);
        // The next dim is long enough.
        let over_time = plan(&linear(&[0, 1]), &[(&Placement::Replicate, &[1, 5, 3]), (&Placement::Local, &[3, 4])]);
        assert_eq!(over_time, (vec![Slice, Spread], vec![shard(1, [3, 2])]));
        // A shard that came about elsewhere is given up.
        let lone = shard(0, [0, batch]);
        let gathered = (vec![AllGather], vec![Placement::Replicate]);
        for op in [
            elementwise(),
            Op::Reshape { to: x.to_vec() },
            Op::Expand { to: x.to_vec() },
            Op::Permute { axes: vec![1, 0] },
            Op::Reduce { dim: 0, reduction: Reduction::Sum },
            Op::Reduce { dim: 1, reduction: Reduction::Sum },
            Op::ReduceAll { reduction: Reduction::Sum },
        ] {
            assert_eq!(plan(&op, &[(&lone, &x)]), gathered, "{op:?}");
        }
    }
    // A weight without inputs: the batch is shared all the same.
    let no_features = plan(&linear(&[0]), &[(&Placement::Local, &[5, 0]), (&Placement::Local, &[0, 4])]);
    assert_eq!(no_features, (vec![Spread, Spread], vec![shard(0, [3, 2])]));
}

#[test]
fn the_largest_shard_stays_and_the_others_come_to_it() {
    let (rows, cols) = (shard(0, [3, 2]), shard(1, [2, 2]));
    let by_size = plan(&elementwise(), &[(&cols, &[1, 4]), (&rows, &[5, 4])]);
    assert_eq!(by_size, (vec![AllGather, Keep], vec![rows.clone()]));
    let tie = plan(&elementwise(), &[(&cols, &[5, 4]), (&rows, &[5, 4])]);
    assert_eq!(tie, (vec![Keep, AllToAll], vec![cols.clone()]));
    let other_lengths = plan(&elementwise(), &[(&rows, &[5, 4]), (&shard(0, [5, 0]), &[5, 4])]);
    assert_eq!(other_lengths, (vec![Keep, AllToAll], vec![rows.clone()]));
    let missing_dim = plan(&elementwise(), &[(&Placement::Local, &[5]), (&cols, &[5, 4])]);
    assert_eq!(missing_dim, (vec![Spread, Keep], vec![cols.clone()]));
    let blocked = Op::Aligned { blocked: vec![1], num_outputs: 1 };
    let second_best = plan(&blocked, &[(&cols, &[5, 4]), (&rows, &[5, 2])]);
    assert_eq!(second_best, (vec![AllToAll, Keep], vec![rows.clone()]));
    let nothing_shared = plan(&blocked, &[(&cols, &[5, 4]), (&Placement::Local, &[5, 2])]);
    assert_eq!(nothing_shared, (vec![AllToAll, Spread], vec![rows.clone()]));
    // No other dim has two rows.
    let alone = plan(&blocked, &[(&cols, &[1, 4]), (&Placement::Local, &[1, 2])]);
    assert_eq!(alone, (vec![AllGather, Spread], vec![Placement::Replicate]));
    let batched = Op::Batched { dims: vec![0, 1], roles: vec![Role::Split; 2], outputs: vec![Yield::Split] };
    let split = plan(&batched, &[(&shard(1, [2, 2]), &[1, 4, 3]), (&shard(0, [3, 2]), &[5, 4, 3])]);
    assert_eq!(split, (vec![AllGather, Keep], vec![rows]));
}

#[test]
fn a_dim_that_does_not_line_up_in_all_operands_is_not_shared() {
    let rows = shard(0, [3, 2]);
    // A gather whose indices are fewer, asked for without blocking the dim.
    let fewer = plan(&elementwise(), &[(&rows, &[5, 4]), (&Placement::Replicate, &[3, 4])]);
    assert_eq!(fewer, (vec![AllToAll, Slice], vec![shard(1, [2, 2])]));
    let batched =
        |dims: &[usize]| Op::Batched { dims: dims.to_vec(), roles: vec![Role::Split; 2], outputs: vec![Yield::Sum] };
    let unlike = plan(&batched(&[0]), &[(&rows, &[5, 4]), (&Placement::Replicate, &[3, 4])]);
    assert_eq!(unlike, (vec![AllGather, Keep], vec![Placement::Replicate]));
    let next_dim = plan(&batched(&[0, 1]), &[(&rows, &[5, 4]), (&Placement::Replicate, &[3, 4])]);
    assert_eq!(next_dim, (vec![AllToAll, Slice], vec![SUM]));
    let missing = plan(&batched(&[1, 0]), &[(&shard(1, [2, 2]), &[5, 4]), (&Placement::Replicate, &[5])]);
    assert_eq!(missing, (vec![AllToAll, Slice], vec![SUM]));
}

#[test]
fn nothing_of_size_0_is_reshaped_in_shards() {
    let reshaped = plan(&Op::Reshape { to: vec![5, 3, 0] }, &[(&shard(0, [3, 2]), &[5, 0])]);
    assert_eq!(reshaped, (vec![AllGather], vec![Placement::Replicate]));
}

#[test]
fn shares_decide_only_where_nothing_is_sharded_yet() {
    let shares = Shares::Weighted(vec![3, 1]);
    let shared_already = shard(0, [4, 4]);
    let [fresh, shared] = [&Placement::Local, &shared_already].map(|placement| Operand { placement, shape: &[8, 3] });
    let weight = Operand { placement: &Placement::Local, shape: &[3, 4] };
    for op in [linear(&[0]), Op::Matmul] {
        let by_shares = op.plan(&[fresh, weight], &shares, 2).expect("a plan");
        assert_eq!(by_shares.outputs, [shard(0, [6, 2])]);
        let kept = op.plan(&[shared, weight], &shares, 2).expect("a plan");
        assert_eq!(kept.outputs, [shard(0, [4, 4])]);
        let error = PlacementError::WeightCount { num_weights: 2, world_size: 3 };
        assert_eq!(op.plan(&[fresh, weight], &shares, 3), Err(error));
    }
}

#[test]
fn an_op_without_operands_has_a_plan() {
    let random = Op::Whole { num_outputs: 1 };
    assert_eq!(plan(&random, &[]), (vec![], vec![Placement::Replicate]));
    assert_eq!(plan(&elementwise(), &[]), (vec![], vec![Placement::Replicate]));
}

#[test]
fn operands_that_do_not_fit_are_an_error() {
    let whole = &Placement::Replicate;
    let count = |op: &Op, operands: &[(&Placement, &[usize])], expected| {
        let error = try_plan(op, operands, 2).expect_err("too few or too many operands");
        assert!(
            matches!(error, PlacementError::OperandCount { expected: e, actual, .. } if (e, actual) == (expected, operands.len())),
            "{error}"
        );
    };
    count(&Op::Matmul, &[(whole, &[2, 2])], 2);
    count(&linear(&[0]), &[(whole, &[2, 2])], 2);
    count(&Op::Permute { axes: vec![0] }, &[], 1);
    count(&Op::ReduceAll { reduction: Reduction::Sum }, &[(whole, &[2]), (whole, &[2])], 1);

    for misplaced in [&shard(1, [1, 1]), &shard(0, [1, 1]), &shard(0, [3, 2, 0])] {
        let error =
            try_plan(&elementwise(), &[(whole, &[5]), (misplaced, &[5])], 2).expect_err("a shard that does not fit");
        assert!(matches!(error, PlacementError::Misplaced { operand: 1, .. }), "{error}");
    }

    let unfit = |op: &Op, operands: &[(&Placement, &[usize])]| {
        let error = try_plan(op, operands, 2).expect_err("shapes that do not fit");
        assert!(matches!(error, PlacementError::Shape { .. }), "{error}");
    };
    unfit(&Op::Matmul, &[(whole, &[2, 3]), (whole, &[2, 3])]);
    unfit(&Op::Matmul, &[(whole, &[3]), (whole, &[3])]);
    unfit(&Op::Matmul, &[(whole, &[]), (whole, &[])]);
    unfit(&Op::Matmul, &[(whole, &[2, 2, 3]), (whole, &[3, 2])]);
    unfit(&Op::Matmul, &[(whole, &[2, 2, 3]), (whole, &[3, 3, 2])]);
    unfit(&Op::Reshape { to: vec![4] }, &[(whole, &[5])]);
    unfit(&Op::Permute { axes: vec![0, 0] }, &[(whole, &[2, 3])]);
    unfit(&Op::Permute { axes: vec![1, 0, 2] }, &[(whole, &[2, 3])]);
    unfit(&Op::Expand { to: vec![3] }, &[(whole, &[2, 3])]);
    unfit(&Op::Expand { to: vec![4, 3] }, &[(whole, &[2, 3])]);
    unfit(&Op::Reduce { dim: 2, reduction: Reduction::Sum }, &[(whole, &[2, 3])]);
    let error = try_plan(&Op::Matmul, &[(whole, &[2, 3]), (whole, &[2, 3])], 2).expect_err("it does not fit");
    assert_eq!(error.to_string(), "Matmul does not fit operands of shapes [[2, 3], [2, 3]]");
}
