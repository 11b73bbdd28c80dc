use bonfire_placement::{Op, Role, Yield};

use crate::case::{Case, check};
use crate::dense::Dense;
use crate::horner;

fn op(dims: &[usize], roles: &[Role], outputs: &[Yield]) -> Op {
    Op::Batched { dims: dims.to_vec(), roles: roles.to_vec(), outputs: outputs.to_vec() }
}

/// `[.., input] x [input, output] + [output]`.
fn linear(rows: &[usize], [input, output]: [usize; 2]) -> Case {
    let dims: Vec<usize> = (0..rows.len()).collect();
    let op = op(&dims, &[Role::Split, Role::Whole, Role::Whole], &[Yield::Split]);
    let x = [rows, &[input]].concat();
    Case::new(op, &[&x, &[input, output], &[output]], move |operands| {
        let [x, weight, bias] = operands else { panic!("three operands") };
        let last = x.shape.len() - 1;
        let mut shape = x.shape.clone();
        shape[last] = output;
        vec![Dense::from_fn(&shape, |index| {
            let mut from = index.to_vec();
            let product = |i: usize| {
                from[last] = i;
                x.at(&from) * weight.at(&[i, index[last]])
            };
            (0..input).map(product).sum::<f64>() + bias.at(&[index[last]])
        })]
    })
}

/// `dw = x^T dy` and `db = sum(dy)`: both are sums over all rows.
fn linear_backward(rows: &[usize], [input, output]: [usize; 2]) -> Case {
    let dims: Vec<usize> = (0..rows.len()).collect();
    let op = op(&dims, &[Role::Split, Role::Split], &[Yield::Sum, Yield::Sum]);
    let (x, dy) = ([rows, &[input]].concat(), [rows, &[output]].concat());
    Case::new(op, &[&x, &dy], move |operands| {
        let num_rows: usize = operands[0].shape[..operands[0].shape.len() - 1].iter().product();
        let x = operands[0].reshape(&[num_rows, input]);
        let dy = operands[1].reshape(&[num_rows, output]);
        let bias = dy.fold(0, 0.0, |sum, value| sum + value).reshape(&[output]);
        vec![x.permute(&[1, 0]).matmul(&dy), bias]
    })
}

/// `[batch, channel, length]` by `[output, channel, kernel]`.
fn conv(x: [usize; 3], weight: [usize; 3]) -> Case {
    let op = op(&[0], &[Role::Split, Role::Whole], &[Yield::Split]);
    Case::new(op, &[&x, &weight], move |operands| {
        let shape = [operands[0].shape[0], weight[0], x[2] - weight[2] + 1];
        vec![Dense::from_fn(&shape, |index| {
            let &[n, o, l] = index else { panic!("three dims") };
            let tap = |tap: usize| {
                let (c, k) = (tap / weight[2], tap % weight[2]);
                operands[0].at(&[n, c, l + k]) * operands[1].at(&[o, c, k])
            };
            (0..weight[1] * weight[2]).map(tap).sum()
        })]
    })
}

/// `dx` by rows and `dw` as a sum, from x, weight and dy.
fn conv_backward(x: [usize; 3], weight: [usize; 3]) -> Case {
    let op = op(&[0], &[Role::Split, Role::Whole, Role::Split], &[Yield::Split, Yield::Sum]);
    let length = x[2] - weight[2] + 1;
    let dy = [x[0], weight[0], length];
    Case::new(op, &[&x, &weight, &dy], move |operands| {
        let [x, w, dy] = operands else { panic!("three operands") };
        let taps = |index: [usize; 2]| (0..index[0]).flat_map(move |a| (0..index[1]).map(move |b| (a, b)));
        let dx = Dense::from_fn(&x.shape, |index| {
            let &[n, c, i] = index else { panic!("three dims") };
            let inside = |k: usize| i.checked_sub(k).filter(|&l| l < length);
            let tap = |(o, k): (usize, usize)| Some(dy.at(&[n, o, inside(k)?]) * w.at(&[o, c, k]));
            taps([weight[0], weight[2]]).filter_map(tap).sum()
        });
        let dw = Dense::from_fn(&weight, |index| {
            let &[o, c, k] = index else { panic!("three dims") };
            let tap = |(n, l): (usize, usize)| x.at(&[n, c, l + k]) * dy.at(&[n, o, l]);
            taps([x.shape[0], length]).map(tap).sum()
        });
        vec![dx, dw]
    })
}

/// Each row depends on all of its last dim, and on a weight.
fn row_norm(shape: &[usize]) -> Case {
    let last = shape.len() - 1;
    let dims: Vec<usize> = (0..last).collect();
    let op = op(&dims, &[Role::Split, Role::Whole], &[Yield::Split]);
    Case::new(op, &[shape, &[shape[last]]], move |operands| {
        let hashes = operands[0].fold(last, 0.0, horner);
        let scaled = |index: &[usize]| operands[0].at(index) * operands[1].at(&[index[last]]) + hashes.at(index);
        vec![Dense::from_fn(&operands[0].shape, scaled)]
    })
}

/// Rows of a table, picked by indices.
fn embedding(table: [usize; 2], indices: [usize; 2]) -> Case {
    let op = op(&[0, 1], &[Role::Whole, Role::Split], &[Yield::Split]);
    Case::new(op, &[&table, &indices], move |operands| {
        let picked = &operands[1];
        let shape = [picked.shape[0], picked.shape[1], table[1]];
        vec![Dense::from_fn(&shape, |index| {
            let row = picked.at(&index[..2]).rem_euclid(table[0] as f64) as usize;
            operands[0].at(&[row, index[2]])
        })]
    })
}

#[test]
fn forward_ops_over_a_batch_equal_one_device_whatever_is_sharded() {
    let seen = check([
        linear(&[5], [2, 3]),
        linear(&[2], [2, 2]),
        linear(&[1], [3, 2]),
        linear(&[0], [2, 1]),
        linear(&[3], [0, 2]),
        linear(&[3, 2], [2, 1]),
        linear(&[1, 5], [3, 2]),
        linear(&[2, 1, 3], [1, 2]),
        conv([5, 2, 3], [3, 2, 2]),
        conv([2, 2, 2], [2, 2, 2]),
        conv([1, 3, 5], [2, 3, 1]),
        conv([0, 1, 2], [1, 1, 2]),
        row_norm(&[5, 3]),
        row_norm(&[3, 2, 5]),
        row_norm(&[1, 5, 2]),
        row_norm(&[2, 2, 1, 3]),
        row_norm(&[3, 0]),
        embedding([3, 2], [5, 2]),
        embedding([5, 1], [1, 7]),
        embedding([2, 2], [2, 2]),
    ]);
    assert!(seen.num_replicate > 0 && seen.num_shard > 0 && seen.num_partial == 0, "{seen:?}");
}

#[test]
fn backward_ops_over_a_batch_equal_one_device_whatever_is_sharded() {
    let seen = check([
        linear_backward(&[5], [2, 3]),
        linear_backward(&[2], [2, 2]),
        linear_backward(&[1], [2, 3]),
        linear_backward(&[0], [2, 3]),
        linear_backward(&[3, 5], [2, 1]),
        linear_backward(&[1, 7], [2, 2]),
        linear_backward(&[2, 2, 2], [2, 2]),
        conv_backward([3, 2, 3], [2, 2, 2]),
        conv_backward([2, 2, 2], [2, 2, 2]),
        conv_backward([1, 1, 3], [2, 1, 2]),
    ]);
    assert!(seen.num_replicate > 0 && seen.num_shard > 0 && seen.num_partial > 0, "{seen:?}");
}

#[test]
fn a_split_operand_of_length_1_broadcasts() {
    let scale = |operands: &[Dense]| {
        let product = Dense::elementwise(operands, |v| v[0] * v[1]);
        let sum = product.fold(0, 0.0, |sum, value| sum + value);
        vec![product, sum]
    };
    let case = |lhs: &[usize], rhs: &[usize]| {
        Case::new(op(&[0], &[Role::Split, Role::Split], &[Yield::Split, Yield::Sum]), &[lhs, rhs], scale)
    };
    let seen =
        check([case(&[5, 3], &[1, 3]), case(&[1, 3], &[5, 3]), case(&[1, 3], &[1, 3]), case(&[3, 1, 2], &[1, 2, 2])]);
    assert!(seen.num_replicate > 0 && seen.num_shard > 0 && seen.num_partial > 0, "{seen:?}");
}

#[test]
fn an_output_that_needs_everything_makes_every_rank_compute_it() {
    let outputs = [Yield::Split, Yield::Whole, Yield::Sum];
    let seen = check([Case::new(op(&[0], &[Role::Split, Role::Split], &outputs), &[&[5, 2], &[5]], |operands| {
        let hash = |operand: &Dense| operand.fold_all(0.0, horner);
        vec![operands[0].clone(), hash(&operands[0]), hash(&operands[1])]
    })]);
    assert!(seen.num_replicate > 0 && seen.num_shard + seen.num_partial == 0, "{seen:?}");
}
