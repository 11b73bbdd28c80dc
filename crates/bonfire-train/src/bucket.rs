//! Which gradients travel together; pure.
//!
//! Backward makes gradients from the last parameter to the first, so buckets are filled in that order: the first one
//! is small, to be on its way soon.
//!
//! Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020,
//! section 3.2.3; its reducer's caps of 1 and 25 MiB.

use burn::tensor::DType;

/// The default of [`BucketCaps::first_bytes`]: 1 MiB.
const FIRST_BYTES: usize = 1024 * 1024;

/// The default of [`BucketCaps::bytes`]: 25 MiB.
const BYTES: usize = 25 * 1024 * 1024;

/// How many bytes of gradients a bucket holds; one larger gradient has a bucket of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BucketCaps {
    /// Of the first bucket of each dtype.
    pub(crate) first_bytes: usize,
    /// Of all others.
    pub(crate) bytes: usize,
}

impl Default for BucketCaps {
    fn default() -> Self {
        Self { first_bytes: FIRST_BYTES, bytes: BYTES }
    }
}

/// Gradients of one dtype that are reduced together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bucket {
    pub(crate) dtype: DType,
    /// Indices of parameters, falling.
    pub(crate) parameters: Vec<usize>,
    pub(crate) num_bytes: usize,
}

/// The buckets of parameters of these (dtype, bytes), in the order in which backward completes them.
pub(crate) fn buckets(parameters: &[(DType, usize)], caps: BucketCaps) -> Vec<Bucket> {
    let mut closed: Vec<Bucket> = Vec::new();
    // One bucket per dtype is filled at a time: weights in halves between norms in f32 still share buckets.
    let mut open: Vec<Bucket> = Vec::new();
    for (index, &(dtype, num_bytes)) in parameters.iter().enumerate().rev() {
        let is_first = !closed.iter().any(|bucket| bucket.dtype == dtype);
        let cap = if is_first { caps.first_bytes } else { caps.bytes };
        let place = open.iter().position(|bucket| bucket.dtype == dtype);
        let place = match place {
            Some(place) if open[place].num_bytes + num_bytes <= cap || open[place].num_bytes == 0 => place,
            Some(place) => {
                closed.push(open.remove(place));
                open.push(Bucket { dtype, parameters: Vec::new(), num_bytes: 0 });
                open.len() - 1
            }
            None => {
                open.push(Bucket { dtype, parameters: Vec::new(), num_bytes: 0 });
                open.len() - 1
            }
        };
        open[place].parameters.push(index);
        open[place].num_bytes += num_bytes;
    }
    closed.append(&mut open);
    // A bucket is complete with its last gradient, that of its first parameter.
    closed.sort_by_key(|bucket| core::cmp::Reverse(bucket.parameters.last().copied()));
    closed
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CAPS: BucketCaps = BucketCaps { first_bytes: 10, bytes: 100 };

    fn plan(parameters: &[(DType, usize)]) -> Vec<Vec<usize>> {
        buckets(parameters, CAPS).into_iter().map(|bucket| bucket.parameters).collect()
    }

    #[test]
    fn buckets_are_filled_from_the_last_parameter_and_the_first_is_small() {
        let parameters = [50, 40, 30, 60, 40, 4, 4].map(|num_bytes| (DType::F32, num_bytes));
        assert_eq!(plan(&parameters), [vec![6, 5], vec![4, 3], vec![2, 1], vec![0]]);
    }

    #[test]
    fn a_parameter_larger_than_the_cap_has_a_bucket_of_its_own() {
        let parameters = [4, 1000, 4].map(|num_bytes| (DType::F32, num_bytes));
        assert_eq!(plan(&parameters), [[2], [1], [0]]);
    }

    #[test]
    fn dtypes_do_not_mix_and_do_not_break_each_others_buckets() {
        let parameters = [(DType::BF16, 4), (DType::F32, 4), (DType::BF16, 4), (DType::F32, 4)];
        assert_eq!(plan(&parameters), [[3, 1], [2, 0]]);
    }

    #[test]
    fn no_parameters_need_no_bucket_and_empty_ones_one() {
        assert_eq!(plan(&[]), [[0usize; 0]; 0]);
        assert_eq!(plan(&[(DType::F32, 0), (DType::F32, 0)]), [[1, 0]]);
    }

    proptest! {
        #[test]
        fn each_parameter_is_in_one_bucket_and_caps_hold(
            parameters in prop::collection::vec((prop::sample::select(vec![DType::F32, DType::BF16]), 0usize..150), 0..30),
        ) {
            let plan = buckets(&parameters, CAPS);
            let mut seen: Vec<usize> = plan.iter().flat_map(|bucket| bucket.parameters.clone()).collect();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..parameters.len()).collect::<Vec<_>>());
            for bucket in &plan {
                prop_assert!(bucket.parameters.is_sorted_by(|a, b| a > b));
                prop_assert!(bucket.parameters.iter().all(|&index| parameters[index].0 == bucket.dtype));
                prop_assert_eq!(bucket.num_bytes, bucket.parameters.iter().map(|&index| parameters[index].1).sum::<usize>());
                let num_filled = bucket.parameters.iter().filter(|&&index| parameters[index].1 > 0).count();
                prop_assert!(bucket.num_bytes <= CAPS.bytes || num_filled == 1);
            }
            prop_assert!(plan.is_sorted_by_key(|bucket| core::cmp::Reverse(bucket.parameters.last().copied())));
        }
    }
}
