use bonfire_placement::Op;

use crate::SHAPES;
use crate::case::{Case, check};
use crate::dense::Dense;

fn elementwise() -> Op {
    Op::Aligned { blocked: Vec::new(), num_outputs: 1 }
}

fn blocked(dims: &[usize]) -> Op {
    Op::Aligned { blocked: dims.to_vec(), num_outputs: 1 }
}

pub(crate) fn flip(whole: &Dense, dim: usize) -> Dense {
    let mut from = Vec::new();
    Dense::from_fn(&whole.shape, |index| {
        from.clear();
        from.extend_from_slice(index);
        from[dim] = whole.shape[dim] - 1 - index[dim];
        whole.at(&from)
    })
}

/// The running Horner values along `dim`, and the flipped input: like a sort, two outputs and a dim that must be whole.
pub(crate) fn scan(shape: &[usize], dim: usize) -> Case {
    let op = Op::Aligned { blocked: vec![dim], num_outputs: 2 };
    Case::new(op, &[shape], move |operands| {
        let whole = &operands[0];
        let rows = 0..whole.shape[dim];
        let until = |row: usize| whole.slice(dim, 0..row + 1).fold(dim, 0.0, crate::horner);
        let mut scanned: Vec<Dense> = rows.map(until).collect();
        scanned.insert(0, whole.slice(dim, 0..0));
        vec![Dense::concat(&scanned, dim), flip(whole, dim)]
    })
}

/// `shape` with length 1 on each dim in turn, and on all.
fn broadcasts(shape: &[usize]) -> Vec<Vec<usize>> {
    let mut shapes = vec![shape.to_vec(), vec![1; shape.len()]];
    for dim in 0..shape.len() {
        let mut broadcast = shape.to_vec();
        broadcast[dim] = 1;
        shapes.push(broadcast);
    }
    shapes.sort();
    shapes.dedup();
    shapes
}

#[test]
fn elementwise_ops_equal_one_device_whatever_is_sharded() {
    let sub = |operands: &[Dense]| vec![Dense::elementwise(operands, |v| 2.0 * v[0] - 3.0 * v[1])];
    let mut cases = Vec::new();
    for shape in SHAPES {
        cases.push(Case::new(elementwise(), &[shape], |operands| vec![operands[0].map(|v| v * v - 1.0)]));
        for other in broadcasts(shape) {
            cases.push(Case::new(elementwise(), &[shape, &other], sub));
            cases.push(Case::new(elementwise(), &[&other, shape], sub));
        }
    }
    cases.push(Case::new(elementwise(), &[&[3, 1], &[1, 5]], sub));
    cases.push(Case::new(elementwise(), &[&[1, 3, 2], &[5, 1, 2]], sub));
    let seen = check(cases);
    assert!(seen.num_replicate > 0 && seen.num_shard > seen.num_replicate, "{seen:?}");
}

#[test]
fn ops_with_many_operands_and_outputs_follow_one_shard() {
    let fused = |operands: &[Dense]| {
        vec![Dense::elementwise(operands, |v| v[0] * v[1] + v[2]), Dense::elementwise(operands, |v| v[0] - v[1] * v[2])]
    };
    let op = || Op::Aligned { blocked: Vec::new(), num_outputs: 2 };
    let seen = check([
        Case::new(op(), &[&[3, 5], &[3, 5], &[3, 5]], fused),
        Case::new(op(), &[&[3, 1], &[3, 5], &[1, 5]], fused),
        Case::new(op(), &[&[2, 2], &[1, 2], &[2, 1]], fused),
        Case::new(op(), &[&[2, 1, 3], &[1, 1, 1], &[2, 2, 3]], fused),
        Case::new(op(), &[&[2, 0], &[2, 1], &[1, 1]], fused),
    ]);
    assert!(seen.num_replicate > 0 && seen.num_shard > 0, "{seen:?}");
}

#[test]
fn a_blocked_dim_is_whole_on_every_rank() {
    let mut cases = Vec::new();
    for shape in SHAPES {
        for dim in 0..shape.len() {
            cases.push(scan(shape, dim));
        }
    }
    cases.push(Case::new(blocked(&[0, 2]), &[&[3, 5, 2]], |operands| vec![flip(&flip(&operands[0], 0), 2)]));
    let seen = check(cases);
    assert!(seen.num_replicate > 0 && seen.num_shard > 0, "{seen:?}");
}

#[test]
fn lengths_may_differ_on_a_blocked_dim() {
    let cat = |dim: usize| move |operands: &[Dense]| vec![Dense::concat(operands, dim)];
    let tail = |dim: usize| move |operands: &[Dense]| vec![operands[0].slice(dim, 1..operands[0].shape[dim])];
    let windows = |operands: &[Dense]| {
        let (whole, last) = (&operands[0], operands[0].shape.len() - 1);
        let mut shape = whole.shape.clone();
        shape[last] -= 1;
        shape.push(2);
        vec![Dense::from_fn(&shape, |index| {
            let mut from = index[..=last].to_vec();
            from[last] += index[last + 1];
            whole.at(&from)
        })]
    };
    let seen = check([
        Case::new(blocked(&[0]), &[&[3, 2], &[5, 2]], cat(0)),
        Case::new(blocked(&[1]), &[&[3, 2], &[3, 1]], cat(1)),
        Case::new(blocked(&[1]), &[&[3, 2], &[3, 0], &[3, 1]], cat(1)),
        Case::new(blocked(&[2]), &[&[2, 1, 2], &[2, 1, 5]], cat(2)),
        Case::new(blocked(&[0]), &[&[7, 3]], tail(0)),
        Case::new(blocked(&[1]), &[&[5, 2, 3]], tail(1)),
        Case::new(blocked(&[1]), &[&[2, 1, 3]], tail(1)),
        Case::new(blocked(&[1]), &[&[5, 7]], windows),
        Case::new(blocked(&[0]), &[&[7]], windows),
        Case::new(blocked(&[2]), &[&[2, 3, 5]], windows),
    ]);
    assert!(seen.num_replicate > 0 && seen.num_shard > 0, "{seen:?}");
}

#[test]
fn missing_trailing_dims_broadcast() {
    let scale_rows = |operands: &[Dense]| vec![Dense::elementwise(operands, |v| 2.0 * v[0] * v[1] + v[0])];
    let seen = check([
        Case::new(elementwise(), &[&[5], &[5, 3]], scale_rows),
        Case::new(elementwise(), &[&[3, 5, 2], &[3, 5]], scale_rows),
        Case::new(elementwise(), &[&[3, 1, 2], &[1, 5]], scale_rows),
        Case::new(elementwise(), &[&[2, 2, 2], &[2]], scale_rows),
    ]);
    assert!(seen.num_replicate > 0 && seen.num_shard > 0, "{seen:?}");
}
