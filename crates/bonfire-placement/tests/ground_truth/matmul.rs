use bonfire_placement::Op;

use crate::case::{Case, check};

fn matmul(lhs: &[usize], rhs: &[usize]) -> Case {
    Case::new(Op::Matmul, &[lhs, rhs], |operands| vec![operands[0].matmul(&operands[1])])
}

#[test]
fn matrix_products_equal_one_device_whatever_is_sharded() {
    let seen = check([
        matmul(&[3, 5], &[5, 2]),
        matmul(&[7, 1], &[1, 5]),
        matmul(&[1, 5], &[5, 1]),
        matmul(&[1, 7], &[7, 3]),
        matmul(&[5, 3], &[3, 1]),
        matmul(&[1, 1], &[1, 1]),
        matmul(&[2, 2], &[2, 2]),
        matmul(&[0, 3], &[3, 2]),
        matmul(&[2, 0], &[0, 3]),
        matmul(&[2, 3], &[3, 0]),
    ]);
    assert!(seen.num_replicate > 0 && seen.num_shard > 0 && seen.num_partial > 0, "{seen:?}");
}

#[test]
fn batched_matrix_products_equal_one_device_whatever_is_sharded() {
    let seen = check([
        matmul(&[3, 2, 5], &[3, 5, 2]),
        matmul(&[1, 2, 3], &[5, 3, 2]),
        matmul(&[5, 2, 3], &[1, 3, 2]),
        matmul(&[1, 3, 2], &[1, 2, 5]),
        matmul(&[2, 2, 2], &[2, 2, 2]),
        matmul(&[2, 1, 3], &[2, 3, 1]),
        matmul(&[0, 2, 3], &[0, 3, 2]),
        matmul(&[2, 3, 0], &[2, 0, 2]),
        matmul(&[2, 3, 1, 2], &[2, 3, 2, 2]),
        matmul(&[2, 1, 2, 3], &[1, 3, 3, 2]),
        matmul(&[1, 3, 2, 2], &[2, 1, 2, 3]),
    ]);
    assert!(seen.num_replicate > 0 && seen.num_shard > 0 && seen.num_partial > 0, "{seen:?}");
}
