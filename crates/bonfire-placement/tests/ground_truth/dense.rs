//! A dense array in plain Rust: slow, obvious and right.

use std::ops::Range;

/// Row-major values. They are integers in the tests, so sums are exact in any order.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Dense {
    pub(crate) shape: Vec<usize>,
    data: Vec<f64>,
}

impl Dense {
    pub(crate) fn from_fn(shape: &[usize], mut value: impl FnMut(&[usize]) -> f64) -> Self {
        let mut index = vec![0; shape.len()];
        let mut data = Vec::with_capacity(shape.iter().product());
        for _ in 0..shape.iter().product() {
            data.push(value(&index));
            for (i, &length) in index.iter_mut().zip(shape).rev() {
                *i = (*i + 1) % length;
                if *i > 0 {
                    break;
                }
            }
        }
        Dense { shape: shape.to_vec(), data }
    }

    pub(crate) fn full(shape: &[usize], value: f64) -> Self {
        Dense::from_fn(shape, |_| value)
    }

    /// Dims of length 1 and missing trailing dims broadcast.
    pub(crate) fn at(&self, index: &[usize]) -> f64 {
        let dims = self.shape.iter().zip(index);
        self.data[dims.fold(0, |offset, (&length, &i)| offset * length + if length == 1 { 0 } else { i })]
    }

    pub(crate) fn slice(&self, dim: usize, rows: Range<usize>) -> Self {
        let mut shape = self.shape.clone();
        shape[dim] = rows.len();
        let mut from = vec![0; shape.len()];
        Dense::from_fn(&shape, |index| {
            from.copy_from_slice(index);
            from[dim] += rows.start;
            self.at(&from)
        })
    }

    pub(crate) fn concat(parts: &[Dense], dim: usize) -> Self {
        let mut shape = parts[0].shape.clone();
        shape[dim] = parts.iter().map(|part| part.shape[dim]).sum();
        let rows: Vec<(&Dense, usize)> =
            parts.iter().flat_map(|part| (0..part.shape[dim]).map(move |row| (part, row))).collect();
        Dense::from_fn(&shape, |index| {
            let (part, row) = rows[index[dim]];
            let mut from = index.to_vec();
            from[dim] = row;
            part.at(&from)
        })
    }

    /// Elementwise, aligned on the left.
    pub(crate) fn elementwise(operands: &[Dense], f: impl Fn(&[f64]) -> f64) -> Self {
        let rank = operands.iter().map(|operand| operand.shape.len()).max().unwrap_or(0);
        let length = |dim: usize| {
            let mut lengths = operands.iter().filter_map(|operand| operand.shape.get(dim).copied());
            lengths.find(|&length| length != 1).unwrap_or(1)
        };
        let shape: Vec<usize> = (0..rank).map(length).collect();
        let mut values = vec![0.0; operands.len()];
        Dense::from_fn(&shape, |index| {
            for (value, operand) in values.iter_mut().zip(operands) {
                *value = operand.at(index);
            }
            f(&values)
        })
    }

    pub(crate) fn reshape(&self, to: &[usize]) -> Self {
        assert_eq!(self.data.len(), to.iter().product::<usize>(), "reshape {:?} to {to:?}", self.shape);
        Dense { shape: to.to_vec(), data: self.data.clone() }
    }

    pub(crate) fn permute(&self, axes: &[usize]) -> Self {
        let shape: Vec<usize> = axes.iter().map(|&axis| self.shape[axis]).collect();
        let mut from = vec![0; axes.len()];
        Dense::from_fn(&shape, |index| {
            for (&axis, &i) in axes.iter().zip(index) {
                from[axis] = i;
            }
            self.at(&from)
        })
    }

    /// Aligned on the right.
    pub(crate) fn expand(&self, to: &[usize]) -> Self {
        let new_dims = to.len() - self.shape.len();
        Dense::from_fn(to, |index| self.at(&index[new_dims..]))
    }

    /// Folds along `dim`, in order; it stays with length 1.
    pub(crate) fn fold(&self, dim: usize, first: f64, f: impl Fn(f64, f64) -> f64) -> Self {
        let mut shape = self.shape.clone();
        shape[dim] = 1;
        let mut from = vec![0; shape.len()];
        Dense::from_fn(&shape, |index| {
            from.copy_from_slice(index);
            (0..self.shape[dim]).fold(first, |folded, row| {
                from[dim] = row;
                f(folded, self.at(&from))
            })
        })
    }

    /// Folds all elements, in order, to shape `[1]`.
    pub(crate) fn fold_all(&self, first: f64, f: impl Fn(f64, f64) -> f64) -> Self {
        Dense { shape: vec![1], data: vec![self.data.iter().copied().fold(first, f)] }
    }

    pub(crate) fn map(&self, f: impl Fn(f64) -> f64) -> Self {
        Dense { shape: self.shape.clone(), data: self.data.iter().copied().map(f).collect() }
    }

    /// `[.., m, k] x [.., k, n]`.
    pub(crate) fn matmul(&self, rhs: &Dense) -> Self {
        let rows = self.shape.len() - 2;
        let num_products = self.shape[rows + 1];
        let longer = |(&lhs, &rhs): (&usize, &usize)| if lhs == 1 { rhs } else { lhs };
        let mut shape: Vec<usize> = self.shape[..rows].iter().zip(&rhs.shape).map(longer).collect();
        shape.extend([self.shape[rows], rhs.shape[rows + 1]]);
        Dense::from_fn(&shape, |index| {
            let (mut lhs_index, mut rhs_index) = (index.to_vec(), index.to_vec());
            let product = |k: usize| {
                (lhs_index[rows + 1], rhs_index[rows]) = (k, k);
                self.at(&lhs_index) * rhs.at(&rhs_index)
            };
            (0..num_products).map(product).sum()
        })
    }
}
