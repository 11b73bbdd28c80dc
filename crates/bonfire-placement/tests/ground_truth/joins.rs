use bonfire_placement::{Lengths, Op, Operand, Placement, Shares};

use crate::case::{Case, check};
use crate::dense::Dense;

/// Tensors of `shape` but for `dim`, which has one of `lengths`.
fn cat(dim: usize, shape: [usize; 2], lengths: &[usize]) -> Case {
    let shapes: Vec<[usize; 2]> = lengths
        .iter()
        .map(|&length| {
            let mut shape = shape;
            shape[dim] = length;
            shape
        })
        .collect();
    let shapes: Vec<&[usize]> = shapes.iter().map(|shape| &shape[..]).collect();
    Case::new(Op::Cat { dim }, &shapes, move |operands| {
        let mut whole = operands[0].shape.clone();
        whole[dim] = operands.iter().map(|operand| operand.shape[dim]).sum();
        vec![Dense::from_fn(&whole, |index| {
            let mut index = index.to_vec();
            for operand in operands {
                match index[dim].checked_sub(operand.shape[dim]) {
                    Some(rest) => index[dim] = rest,
                    None => return operand.at(&index),
                }
            }
            panic!("a row beyond all operands")
        })]
    })
}

#[test]
fn joined_tensors_equal_one_device_whatever_is_sharded() {
    let seen = check([
        cat(0, [0, 3], &[4, 3]),
        cat(1, [2, 0], &[2, 5, 2]),
        cat(0, [0, 2], &[1, 3]),
        cat(0, [0, 2], &[0, 3]),
        cat(1, [1, 0], &[2, 2]),
    ]);
    assert!(seen.num_shard > 0 && seen.num_replicate > 0, "{seen:?}");
}

fn plan(op: &Op, operands: &[(&Placement, &[usize])]) -> (Vec<Placement>, Vec<Placement>) {
    let operands: Vec<Operand> = operands.iter().map(|&(placement, shape)| Operand { placement, shape }).collect();
    let plan = op.plan(&operands, &Shares::Equal, 2).unwrap();
    (plan.inputs, plan.outputs)
}

#[test]
fn ranks_exchange_rows_of_what_is_joined_along_the_shared_dim() {
    let shard = |lengths: [usize; 2]| Placement::shard(0, Lengths::new(lengths));
    let (inputs, outputs) = plan(&Op::Cat { dim: 0 }, &[(&shard([2, 1]), &[3, 5]), (&Placement::Local, &[5, 5])]);
    assert_eq!(inputs, [shard([3, 0]), shard([1, 4])]);
    assert_eq!(outputs, [shard([4, 4])]);
}

#[test]
fn a_range_of_the_shared_dim_leaves_each_rank_its_own_rows() {
    let narrow = |range| Op::Narrow { ranges: vec![Some(range), None], blocked: vec![] };
    let x = Placement::shard(0, Lengths::new([4, 3]));
    for (range, lengths) in [(1..6, [3, 2]), (0..3, [3, 0]), (5..7, [0, 2]), (0..7, [4, 3])] {
        let expected = (vec![x.clone()], vec![Placement::shard(0, Lengths::new(lengths))]);
        assert_eq!(plan(&narrow(range.clone()), &[(&x, &[7, 2])]), expected, "{range:?}");
    }
    let whole = (vec![Placement::Replicate], vec![Placement::Replicate]);
    // One row, none, or rows cut in another way.
    assert_eq!(plan(&narrow(3..4), &[(&x, &[7, 2])]), whole);
    assert_eq!(plan(&narrow(3..3), &[(&x, &[7, 2])]), whole);
    assert_eq!(plan(&Op::Narrow { ranges: vec![None, None], blocked: vec![0] }, &[(&x, &[7, 2])]), whole);
    let beside = (vec![x.clone()], vec![x.clone()]);
    assert_eq!(plan(&Op::Narrow { ranges: vec![None, Some(0..1)], blocked: vec![] }, &[(&x, &[7, 2])]), beside);
}
