//! The rules against the truth: what each op gives on whole arrays, for every placement of every operand.
//!
//! `dense` computes, `ranks` splits, moves and assembles, `case` compares; the others list the cases of one rule each.

mod aligned;
mod batched;
mod case;
mod dense;
mod joins;
mod matmul;
mod ranks;
mod reduce;
mod rows;
mod views;

use std::collections::HashMap;

use bonfire_placement::{Op, PartialOp, Placement, Plan, Reduction};

use case::{Case, check};
use dense::Dense;

/// Shapes of 1 to 4 dims, with lengths of 0, 1 and odd ones, and some whose dims cannot be told apart by length.
const SHAPES: [&[usize]; 22] = [
    &[1],
    &[2],
    &[5],
    &[7],
    &[0],
    &[1, 1],
    &[2, 2],
    &[3, 2],
    &[5, 7],
    &[7, 1],
    &[1, 5],
    &[0, 3],
    &[3, 0],
    &[2, 2, 2],
    &[3, 1, 5],
    &[5, 2, 3],
    &[1, 3, 2],
    &[2, 0, 3],
    &[2, 3, 1, 2],
    &[3, 2, 1, 5],
    &[1, 2, 3, 2],
    &[2, 2, 2, 2],
];

/// A fold that depends on the order and on every value.
fn horner(folded: f64, value: f64) -> f64 {
    (folded * 3.0 + value).rem_euclid(1009.0)
}

#[test]
fn an_op_without_a_rule_runs_whole_on_every_rank() {
    let hash = |operands: &[Dense]| {
        let hash = operands.iter().fold(0.0, |hash, operand| operand.fold_all(hash, horner).at(&[0]));
        vec![Dense::full(&[1], hash), operands[0].clone()]
    };
    let case = |lhs: &[usize], rhs: &[usize]| Case::new(Op::Whole { num_outputs: 2 }, &[lhs, rhs], hash);
    let seen = check([case(&[3, 2], &[5]), case(&[2, 0], &[1, 2, 3]), case(&[2], &[2])]);
    assert!(seen.num_replicate > 0 && seen.num_shard + seen.num_partial == 0, "{seen:?}");
}

/// Plans that are wrong, so that the checker is known to tell.
#[test]
fn a_wrong_plan_is_caught() {
    let rejected = |case: &Case, given: &Placement, input: &Placement, output: &Placement| {
        let plan = Plan { inputs: vec![input.clone()], outputs: vec![output.clone()] };
        case.verify(std::slice::from_ref(given), &plan, 2, &mut HashMap::new()).expect_err("a wrong plan passed")
    };
    let rows = Placement::shard(0, [3, 1]);
    let sum = Placement::Partial { op: PartialOp::Sum };

    let scan = aligned::scan(&[4, 2], 0);
    assert!(rejected(&scan, &rows, &rows, &rows).contains("another number of inputs or outputs"));
    let reverse = Case::new(Op::Aligned { blocked: vec![0], num_outputs: 1 }, &[&[4, 2]], |operands| {
        vec![aligned::flip(&operands[0], 0)]
    });
    assert!(rejected(&reverse, &rows, &rows, &rows).contains("it gives"));
    assert!(rejected(&reverse, &sum, &rows, &sum).contains("gives shape"));
    assert!(rejected(&reverse, &rows, &sum, &sum).contains("cannot become partial(sum)"));
    assert!(rejected(&reverse, &Placement::Local, &Placement::Local, &Placement::Replicate).contains("is planned"));
    assert!(rejected(&reverse, &rows, &rows, &Placement::Replicate).contains("gives shape"));

    let reshape = views::reshape(&[2, 3], &[6]);
    let columns = Placement::shard(1, [2, 1]);
    assert!(rejected(&reshape, &columns, &columns, &Placement::shard(0, [4, 2])).contains("it gives"));

    let mean = reduce::along(&[4, 2], 0, Reduction::Mean);
    let max = Placement::Partial { op: PartialOp::Max };
    assert!(rejected(&mean, &rows, &rows, &max).contains("it gives"));
    assert!(rejected(&mean, &rows, &rows, &Placement::Replicate).contains("replicated parts differ"));
    let one = reduce::along(&[1, 2], 0, Reduction::Sum);
    let lone = Placement::shard(0, [1, 0]);
    assert!(rejected(&one, &lone, &lone, &sum).contains("of shape [1, 2]"));
}
