use bonfire_placement::{Lengths, Op, Operand, Placement, PlacementError, Shares};

use crate::case::{Case, check};
use crate::dense::Dense;
use crate::horner;

fn op(inputs: &[Option<usize>], outputs: &[Option<usize>]) -> Op {
    Op::Rows { inputs: inputs.to_vec(), outputs: outputs.to_vec() }
}

/// Columns of `[rows, columns]`, picked by a list of indices.
fn select([rows, columns]: [usize; 2], num_indices: usize) -> Case {
    Case::new(op(&[None, Some(0)], &[Some(1)]), &[&[rows, columns], &[num_indices]], move |operands| {
        let [table, indices] = operands else { panic!("two operands") };
        let column = |index: usize| indices.at(&[index]).rem_euclid(columns as f64) as usize;
        let shape = [rows, indices.shape[0]];
        vec![Dense::from_fn(&shape, |index| table.at(&[index[0], column(index[1])]))]
    })
}

/// Columns of `[rows, num_indices]` added up in `[rows, columns]`, each where its index says.
fn scatter_into_zeros(rows: usize, columns: usize, num_indices: usize) -> Case {
    Case::new(op(&[Some(1), Some(0)], &[None]), &[&[rows, num_indices], &[num_indices]], move |operands| {
        let [values, indices] = operands else { panic!("two operands") };
        let goes_to = |from: usize, column: usize| indices.at(&[from]).rem_euclid(columns as f64) as usize == column;
        vec![Dense::from_fn(&[rows, columns], |index| {
            let from = (0..indices.shape[0]).filter(|&from| goes_to(from, index[1]));
            from.map(|from| values.at(&[index[0], from])).sum()
        })]
    })
}

/// A loss per item of `[time, items]`, with a weight that all see and a number per item.
fn loss_per_item(time: usize, items: usize) -> Case {
    let inputs: [&[usize]; 3] = [&[time, items], &[time], &[items, 2]];
    Case::new(op(&[Some(1), None, Some(0)], &[Some(0)]), &inputs, move |operands| {
        let [x, weight, per_item] = operands else { panic!("three operands") };
        vec![Dense::from_fn(&[x.shape[1]], |index| {
            let over_time = (0..time).map(|t| x.at(&[t, index[0]]) * weight.at(&[t]));
            horner(over_time.fold(1.0, horner), per_item.at(&[index[0], 1]))
        })]
    })
}

#[test]
fn rows_along_other_dims_in_each_operand_equal_one_device_whatever_is_sharded() {
    let seen = check([
        select([3, 4], 5),
        select([2, 2], 2),
        select([1, 3], 1),
        select([2, 3], 0),
        loss_per_item(3, 5),
        loss_per_item(2, 2),
        loss_per_item(0, 3),
    ]);
    assert!(seen.num_shard > 0 && seen.num_replicate > 0, "{seen:?}");
    assert_eq!(seen.num_partial, 0, "{seen:?}");
    let seen = check([scatter_into_zeros(2, 3, 5), scatter_into_zeros(2, 2, 2), scatter_into_zeros(3, 1, 0)]);
    assert!(seen.num_partial > 0, "{seen:?}");
}

#[test]
fn different_numbers_of_rows_are_an_error() {
    let plan = |inputs: &[Option<usize>], shapes: [&[usize]; 2]| {
        let placement = Placement::shard(0, Lengths::new([2, 1]));
        let operands = [
            Operand { placement: &placement, shape: shapes[0] },
            Operand { placement: &Placement::Local, shape: shapes[1] },
        ];
        op(inputs, &[Some(0)]).plan(&operands, &Shares::Equal, 2)
    };
    for (inputs, shapes) in [([Some(0), Some(0)], [&[3, 2][..], &[2]]), ([Some(0), Some(1)], [&[3], &[3]])] {
        assert!(matches!(plan(&inputs, shapes), Err(PlacementError::Shape { .. })), "{inputs:?} of {shapes:?}");
    }
    assert!(plan(&[Some(0), Some(0)], [&[3, 2], &[3]]).is_ok());
}

#[test]
fn rows_are_shared_where_something_else_was() {
    let x = Placement::shard(0, Lengths::new([2, 1]));
    let plan = |placement| {
        let operands =
            [Operand { placement, shape: &[3, 4] }, Operand { placement: &Placement::Local, shape: &[5, 2] }];
        op(&[None, Some(0)], &[Some(0)]).plan(&operands, &Shares::Equal, 2).unwrap()
    };
    let rows = Placement::shard(0, [3, 2]);
    assert_eq!(plan(&x).inputs, [Placement::Replicate, rows.clone()]);
    assert_eq!(plan(&x).outputs, [rows]);
    assert_eq!(plan(&Placement::Replicate).outputs, [Placement::Replicate]);
}
