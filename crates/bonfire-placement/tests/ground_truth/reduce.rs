use bonfire_placement::{Op, Reduction};

use crate::case::{Case, Seen, check};
use crate::{SHAPES, horner};

const REDUCTIONS: [Reduction; 5] = [Reduction::Sum, Reduction::Mean, Reduction::Max, Reduction::Min, Reduction::Whole];

/// The value that a fold starts from, and what it does with the next one.
fn fold(reduction: Reduction) -> (f64, fn(f64, f64) -> f64) {
    match reduction {
        Reduction::Sum | Reduction::Mean => (0.0, |sum, value| sum + value),
        Reduction::Max => (f64::NEG_INFINITY, f64::max),
        Reduction::Min => (f64::INFINITY, f64::min),
        Reduction::Whole => (0.0, horner),
    }
}

/// Of a mean a rank gives its sum divided by `length`, the whole length.
fn divisor(reduction: Reduction, length: usize) -> f64 {
    if reduction == Reduction::Mean { length.max(1) as f64 } else { 1.0 }
}

pub(crate) fn along(shape: &[usize], dim: usize, reduction: Reduction) -> Case {
    let length = shape[dim];
    let reduce = Case::new(Op::Reduce { dim, reduction }, &[shape], move |operands| {
        let (first, f) = fold(reduction);
        vec![operands[0].fold(dim, first, f).map(|value| value / divisor(reduction, length))]
    });
    reduce.with_unit(length.max(1))
}

fn all(shape: &[usize], reduction: Reduction) -> Case {
    let num_elements: usize = shape.iter().product();
    let reduce = Case::new(Op::ReduceAll { reduction }, &[shape], move |operands| {
        let (first, f) = fold(reduction);
        vec![operands[0].fold_all(first, f).map(|value| value / divisor(reduction, num_elements))]
    });
    reduce.with_unit(num_elements.max(1))
}

#[test]
fn reductions_along_a_dim_equal_one_device_whatever_is_sharded() {
    for reduction in REDUCTIONS {
        let dims = |shape: &'static [usize]| (0..shape.len()).map(move |dim| along(shape, dim, reduction));
        let Seen { num_replicate, num_shard, num_partial } = check(SHAPES.into_iter().flat_map(dims));
        assert!(num_replicate > 0 && num_shard > 0);
        assert_eq!(num_partial > 0, reduction != Reduction::Whole, "{reduction:?}");
    }
}

#[test]
fn reductions_of_everything_equal_one_device_whatever_is_sharded() {
    for reduction in REDUCTIONS {
        let Seen { num_replicate, num_shard, num_partial } = check(SHAPES.map(|shape| all(shape, reduction)));
        assert!(num_replicate > 0 && num_shard == 0);
        assert_eq!(num_partial > 0, reduction != Reduction::Whole, "{reduction:?}");
    }
}
