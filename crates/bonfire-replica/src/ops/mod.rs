//! Burn's operation traits for [`Replica`](crate::Replica): each method names its op family and the inner backend's own
//! method.

#[macro_use]
mod methods;
#[macro_use]
mod convolution;

mod activation;
mod boolean;
mod float;
mod int;
mod module;
mod pooling;
mod quantized;
mod transaction;

use std::ops::Range;

use bonfire_placement::{Cut, Op, Placement, Reduction, Role, Yield};
use burn_backend::{
    DType, MetadataError, Scalar, Shape, Slice, TensorMetadata, calculate_matmul_output,
    ops::unfold::calculate_unfold_shape, tensor::IndexingUpdateOp,
};

use crate::{
    Member, ReplicaTensor,
    execute::{Call, Linearity, Part, Rule, Spec, apply},
    gradients::{note, remembered},
    value::Kind,
};

/// Elementwise on one tensor.
#[inline(always)]
pub(crate) fn unary<B: Member, I: Kind<B>, O: Kind<B>>(
    name: &'static str,
    tensor: ReplicaTensor<B, I>,
    dtype: impl Into<DType>,
    body: impl Fn(I::Primitive) -> O::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, O> {
    on_each(name, Linearity::Nonlinear, tensor, dtype, body)
}

/// The sum or difference of two tensors of one kind and dtype.
#[inline(always)]
pub(crate) fn additive<B: Member, K: Kind<B>>(
    name: &'static str,
    lhs: ReplicaTensor<B, K>,
    rhs: ReplicaTensor<B, K>,
    body: impl Fn(K::Primitive, K::Primitive) -> K::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, K> {
    let dtype = lhs.dtype();
    on_pairs(name, Linearity::Linear, lhs, rhs, dtype, body)
}

/// Elementwise on two tensors of one kind, which must be of one dtype.
#[inline(always)]
pub(crate) fn arithmetic<B: Member, K: Kind<B>, O: Kind<B>>(
    name: &'static str,
    lhs: ReplicaTensor<B, K>,
    rhs: ReplicaTensor<B, K>,
    dtype: impl Into<DType>,
    body: impl Fn(K::Primitive, K::Primitive) -> O::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, O> {
    on_pairs(name, Linearity::Nonlinear, lhs, rhs, dtype, body)
}

/// As [`unary`], with a word on sums in parts.
#[inline(always)]
pub(crate) fn on_each<B: Member, I: Kind<B>, O: Kind<B>>(
    name: &'static str,
    linearity: Linearity,
    tensor: ReplicaTensor<B, I>,
    dtype: impl Into<DType>,
    body: impl Fn(I::Primitive) -> O::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, O> {
    let outline = |(tensor,): &(ReplicaTensor<B, I>,)| (Rule::elementwise(linearity), Spec::new(tensor.shape(), dtype));
    apply(Call::light(name), (tensor,), outline, move |(x,), _| body(x))
}

/// What [`arithmetic`] and [`additive`] share, which differ in what they say of sums.
#[inline(always)]
fn on_pairs<B: Member, K: Kind<B>, O: Kind<B>>(
    name: &'static str,
    linearity: Linearity,
    lhs: ReplicaTensor<B, K>,
    rhs: ReplicaTensor<B, K>,
    dtype: impl Into<DType>,
    body: impl Fn(K::Primitive, K::Primitive) -> O::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, O> {
    let outline = |(lhs, rhs): &(ReplicaTensor<B, K>, ReplicaTensor<B, K>)| {
        let shape = same_dtype(&[lhs.dtype(), rhs.dtype()]).and_then(|()| broadcast(&[&lhs.shape(), &rhs.shape()]));
        (Rule::elementwise(linearity), Spec::inferred(shape, dtype))
    };
    apply(Call::light(name), (lhs, rhs), outline, move |(x, y), _| body(x, y))
}

/// Elementwise on two tensors that broadcast.
pub(crate) fn binary<B: Member, L: Kind<B>, R: Kind<B>, O: Kind<B>>(
    name: &'static str,
    lhs: ReplicaTensor<B, L>,
    rhs: ReplicaTensor<B, R>,
    dtype: impl Into<DType>,
    body: impl Fn(L::Primitive, R::Primitive) -> O::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, O> {
    apply(
        Call::light(name),
        (lhs, rhs),
        |(lhs, rhs)| {
            (Rule::elementwise(Linearity::Nonlinear), Spec::inferred(broadcast(&[&lhs.shape(), &rhs.shape()]), dtype))
        },
        move |(x, y), _| body(x, y),
    )
}

/// `value` where `mask` holds, else `tensor`.
pub(crate) fn mask_where<B: Member, K: Kind<B>, M: Kind<B>>(
    name: &'static str,
    tensor: ReplicaTensor<B, K>,
    mask: ReplicaTensor<B, M>,
    value: ReplicaTensor<B, K>,
    body: impl Fn(K::Primitive, M::Primitive, K::Primitive) -> K::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, K> {
    apply(
        Call::light(name),
        (tensor, mask, value),
        |(tensor, mask, value)| {
            (Rule::elementwise(Linearity::Nonlinear), {
                Spec::inferred(
                    same_dtype(&[tensor.dtype(), value.dtype()])
                        .and_then(|()| broadcast(&[&tensor.shape(), &mask.shape(), &value.shape()])),
                    tensor.dtype(),
                )
            })
        },
        move |(x, m, v), _| body(x, m, v),
    )
}

/// One tensor to one of the same dims, of which `dim` must be whole; the output has `length` there.
pub(crate) fn along<B: Member, I: Kind<B>, O: Kind<B>>(
    name: &'static str,
    tensor: ReplicaTensor<B, I>,
    dim: usize,
    length: usize,
    dtype: impl Into<DType>,
    body: impl Fn(I::Primitive) -> O::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, O> {
    apply(
        Call::light(name),
        (tensor,),
        |(tensor,)| (Rule::new(aligned(vec![dim])), Spec::inferred(with_length(tensor.shape(), dim, length), dtype)),
        move |(x,), _| body(x),
    )
}

/// As [`along`], for the value and the index of a reduction, or of a sort. Indices of no given dtype have the one that
/// the inner backend chooses.
pub(crate) fn along_with_indices<B: Member, K: Kind<B>, L: Kind<B>>(
    name: &'static str,
    tensor: ReplicaTensor<B, K>,
    dim: usize,
    length: usize,
    indices_dtype: Option<DType>,
    body: impl Fn(K::Primitive) -> (K::Primitive, L::Primitive) + Send + Sync + 'static,
) -> (ReplicaTensor<B, K>, ReplicaTensor<B, L>) {
    let shape = with_length(tensor.shape(), dim, length);
    let indices_dtype = indices_dtype
        .unwrap_or_else(|| index_dtype(name, &tensor, few(&tensor.shape(), dim, length), |x| body(x).1.dtype()));
    let specs = (Spec::inferred(shape.clone(), tensor.dtype()), Spec::inferred(shape, indices_dtype));
    let op = Op::Aligned { blocked: vec![dim], num_outputs: 2 };
    apply(Call::light(name), (tensor,), |_| (Rule::new(op), specs), move |(x,), _| body(x))
}

/// As [`along`], for indices of the dtype that the inner backend chooses.
pub(crate) fn indices_along<B: Member, I: Kind<B>, O: Kind<B>>(
    name: &'static str,
    tensor: ReplicaTensor<B, I>,
    dim: usize,
    length: usize,
    body: impl Fn(I::Primitive) -> O::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, O> {
    let dtype = index_dtype(name, &tensor, few(&tensor.shape(), dim, length), |x| body(x).dtype());
    along(name, tensor, dim, length, dtype, body)
}

/// The dtype of the indices that an operation gives, asked once of the inner backend with a tensor of a few elements.
pub(crate) fn index_dtype<B: Member, K: Kind<B>>(
    name: &'static str,
    tensor: &ReplicaTensor<B, K>,
    few: Shape,
    probe: impl FnOnce(K::Primitive) -> DType,
) -> DType {
    let (device, dtype) = (tensor.device(), tensor.dtype());
    device.group.index_dtype(name, dtype, || {
        let zeros = K::full(few, Scalar::new(0, &dtype), device.group.home(), dtype);
        probe(K::restore(zeros))
    })
}

/// A shape of the same rank with as few elements as an operation along `dim` takes.
fn few(shape: &Shape, dim: usize, length: usize) -> Shape {
    (0..shape.num_dims()).map(|other| if other == dim { length } else { 1 }).collect()
}

/// Joins tensors along `dim`.
pub(crate) fn cat<B: Member, K: Kind<B>>(
    name: &'static str,
    tensors: Vec<ReplicaTensor<B, K>>,
    dim: usize,
    body: impl Fn(Vec<K::Primitive>, usize) -> K::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, K> {
    let outline = |tensors: &Vec<ReplicaTensor<B, K>>| {
        let shapes: Vec<Shape> = tensors.iter().map(|tensor| tensor.shape()).collect();
        let dtypes: Vec<DType> = tensors.iter().map(|tensor| tensor.dtype()).collect();
        let shape = same_dtype(&dtypes).and_then(|()| Shape::cat(shapes.iter(), dim));
        (Rule::new(Op::Cat { dim }).linear(), Spec::inferred(shape, dtypes[0]))
    };
    apply(Call::light(name), tensors, outline, move |mut xs, part| {
        if part.rows().is_some_and(|(shared, _)| shared == dim) {
            // This member's part of the whole has no rows of some.
            xs.retain(|x| x.shape()[dim] > 0);
        }
        body(xs, dim)
    })
}

/// The same values in another shape.
#[inline(always)]
pub(crate) fn reshape<B: Member, K: Kind<B>>(
    name: &'static str,
    tensor: ReplicaTensor<B, K>,
    shape: Shape,
    body: impl Fn(K::Primitive, Shape) -> K::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, K> {
    let to = shape.clone();
    let outline = |(tensor,): &(ReplicaTensor<B, K>,)| {
        let from = tensor.shape();
        let op = Op::Reshape { to: to.to_vec() };
        let inferred = match to.num_elements() == from.num_elements() {
            true => Ok(to),
            false => Err(MetadataError::IncompatibleShapes { left: from, right: to }),
        };
        (Rule::new(op), Spec::inferred(inferred, tensor.dtype()))
    };
    apply(Call::light(name), (tensor,), outline, move |(x,), part| body(x, part.shape(0, &shape)))
}

/// Dims in another order: output dim `i` is input dim `axes[i]`.
pub(crate) fn permute<B: Member, K: Kind<B>>(
    name: &'static str,
    tensor: ReplicaTensor<B, K>,
    axes: &[usize],
    body: impl Fn(K::Primitive, &[usize]) -> K::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, K> {
    let outline = |(tensor,): &(ReplicaTensor<B, K>,)| {
        let spec = Spec::inferred(tensor.shape().permuted(axes), tensor.dtype());
        (Rule::new(Op::Permute { axes: axes.to_vec() }), spec)
    };
    let axes = axes.to_vec();
    apply(Call::light(name), (tensor,), outline, move |(x,), _| body(x, &axes))
}

/// Two dims exchanged.
pub(crate) fn swap_dims<B: Member, K: Kind<B>>(
    name: &'static str,
    tensor: ReplicaTensor<B, K>,
    dim1: usize,
    dim2: usize,
    body: impl Fn(K::Primitive) -> K::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, K> {
    let rank = tensor.rank();
    if rank < 2 {
        // Nothing to exchange; a transpose of it is itself.
        return tensor;
    }
    let outline = |(tensor,): &(ReplicaTensor<B, K>,)| {
        let mut axes: Vec<usize> = (0..rank).collect();
        if dim1 < rank && dim2 < rank {
            axes.swap(dim1, dim2);
        }
        (Rule::new(Op::Permute { axes }), Spec::inferred(tensor.shape().swapped(dim1, dim2), tensor.dtype()))
    };
    apply(Call::light(name), (tensor,), outline, move |(x,), _| body(x))
}

/// Dims of length 1, and new leading dims, repeated without a copy.
pub(crate) fn expand<B: Member, K: Kind<B>>(
    name: &'static str,
    tensor: ReplicaTensor<B, K>,
    shape: Shape,
    body: impl Fn(K::Primitive, Shape) -> K::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, K> {
    let to = shape.clone();
    let outline = |(tensor,): &(ReplicaTensor<B, K>,)| {
        let op = Op::Expand { to: to.to_vec() };
        (Rule::new(op), Spec::inferred(tensor.shape().expand(to), tensor.dtype()))
    };
    apply(Call::light(name), (tensor,), outline, move |(x,), part| body(x, part.shape(0, &shape)))
}

/// Some dims reversed.
pub(crate) fn flip<B: Member, K: Kind<B>>(
    name: &'static str,
    tensor: ReplicaTensor<B, K>,
    axes: &[usize],
    body: impl Fn(K::Primitive, &[usize]) -> K::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, K> {
    let outline = |(tensor,): &(ReplicaTensor<B, K>,)| {
        (Rule::new(aligned(axes.to_vec())).linear(), Spec::new(tensor.shape(), tensor.dtype()))
    };
    let axes = axes.to_vec();
    apply(Call::light(name), (tensor,), outline, move |(x,), _| body(x, &axes))
}

/// Some rows of each dim.
pub(crate) fn slice<B: Member, K: Kind<B>>(
    name: &'static str,
    tensor: ReplicaTensor<B, K>,
    slices: &[Slice],
    body: impl Fn(K::Primitive, &[Slice]) -> K::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, K> {
    let outline = |(tensor,): &(ReplicaTensor<B, K>,)| {
        let mut shape = tensor.shape();
        let slices = relative(slices, &shape);
        let (cuts, blocked) = cuts(&slices, &shape);
        for (length, slice) in shape.iter_mut().zip(&slices) {
            *length = slice.output_size(*length);
        }
        (Rule::new(Op::Narrow { cuts, blocked }).linear(), Spec::new(shape, tensor.dtype()))
    };
    note(&tensor);
    let whole = tensor.shape();
    let slices = relative(slices, &whole);
    apply(Call::light(name), (tensor,), outline, move |(x,), part| match part.rows() {
        Some((dim, held)) => {
            let (slices, _) = own_slices(&slices, dim, whole[dim], &held);
            body(x, &slices)
        }
        None => body(x, &slices),
    })
}

/// Some rows of each dim replaced by `value`.
pub(crate) fn slice_assign<B: Member, K: Kind<B>>(
    name: &'static str,
    tensor: ReplicaTensor<B, K>,
    slices: &[Slice],
    value: ReplicaTensor<B, K>,
    body: impl Fn(K::Primitive, &[Slice], K::Primitive) -> K::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, K> {
    let outline = |(tensor, value): &(ReplicaTensor<B, K>, ReplicaTensor<B, K>)| {
        let shape = tensor.shape();
        let (cuts, blocked) = cuts(&relative(slices, &shape), &shape);
        let rule = Rule::new(Op::Assign { cuts, blocked }).linear().following(remembered(tensor));
        let shape = same_dtype(&[tensor.dtype(), value.dtype()]).map(|()| shape);
        (rule, Spec::inferred(shape, tensor.dtype()))
    };
    let whole = tensor.shape();
    let slices = relative(slices, &whole);
    apply(Call::light(name), (tensor, value), outline, move |(x, v), part| match part.rows() {
        Some((dim, held)) => match own_slices(&slices, dim, whole[dim], &held) {
            (_, 0) => x,
            (slices, _) => body(x, &slices, v),
        },
        None => body(x, &slices, v),
    })
}

/// The slices with whole dims said as such, so that they hold on parts too.
fn relative(slices: &[Slice], shape: &Shape) -> Vec<Slice> {
    let is_cut = |slice: &&Slice, length: usize| slice.step != 1 || slice.to_range(length) != (0..length);
    let slice = |(dim, &length): (usize, &usize)| slices.get(dim).filter(|slice| is_cut(slice, length)).copied();
    shape.iter().enumerate().map(|dim| slice(dim).unwrap_or_default()).collect()
}

/// What relative slices keep of each dim, and the dims that they go through backwards.
fn cuts(slices: &[Slice], shape: &Shape) -> (Vec<Option<Cut>>, Vec<usize>) {
    let blocked = (0..slices.len()).filter(|&dim| slices[dim].is_reversed()).collect();
    let cut = |(slice, &length): (&Slice, &usize)| (*slice != Slice::full()).then(|| cut(slice, length));
    (slices.iter().zip(shape.iter()).map(cut).collect(), blocked)
}

fn cut(slice: &Slice, length: usize) -> Cut {
    Cut { rows: slice.to_range(length), step: slice.step.unsigned_abs() }
}

/// The slices with those of `dim` in rows of the part that holds the rows `held` of `length`, and how many rows of `dim`
/// these are.
fn own_slices(slices: &[Slice], dim: usize, length: usize, held: &Range<usize>) -> (Vec<Slice>, usize) {
    let own = cut(&slices[dim], length).within(held);
    let num_rows = own.num_rows();
    let mut slices = slices.to_vec();
    slices[dim] = Slice { step: slices[dim].step, ..Slice::from(own.rows) };
    (slices, num_rows)
}

/// Values picked along `dim`, one index per output element.
pub(crate) fn gather<B: Member, K: Kind<B>, I: Kind<B>>(
    name: &'static str,
    dim: usize,
    tensor: ReplicaTensor<B, K>,
    indices: ReplicaTensor<B, I>,
    body: impl Fn(K::Primitive, I::Primitive) -> K::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, K> {
    let outline = |(tensor, indices): &(ReplicaTensor<B, K>, ReplicaTensor<B, I>)| {
        let blocked = blocked_by_indexing(dim, &tensor.shape(), &indices.shape());
        let op = match shared_dim(tensor) {
            Some(shared) if !blocked.contains(&shared) => aligned(blocked),
            _ if shared_dim(indices) == Some(dim) => rows(vec![None, Some(dim)], vec![Some(dim)]),
            _ => aligned(blocked),
        };
        (Rule::new(op).linear_in(0), Spec::new(indices.shape(), tensor.dtype()))
    };
    note(&tensor);
    apply(Call::light(name), (tensor, indices), outline, move |(x, i), _| body(x, i))
}

/// A tensor, and two that say what happens to it.
type Indexed<B, K, I, V> = (ReplicaTensor<B, K>, ReplicaTensor<B, I>, ReplicaTensor<B, V>);

/// `value` combined into `tensor` along `dim`, one index per element of `value`.
pub(crate) fn scatter<B: Member, K: Kind<B>, I: Kind<B>>(
    name: &'static str,
    dim: usize,
    tensor: ReplicaTensor<B, K>,
    indices: ReplicaTensor<B, I>,
    value: ReplicaTensor<B, K>,
    body: impl Fn(K::Primitive, I::Primitive, K::Primitive) -> K::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, K> {
    let outline = |(tensor, indices, value): &Indexed<B, K, I, K>| {
        let op = match adds_to_zeros(tensor) && [shared_dim(indices), shared_dim(value)].contains(&Some(dim)) {
            true => rows(vec![None, Some(dim), Some(dim)], vec![None]),
            false => aligned(blocked_by_indexing(dim, &tensor.shape(), &indices.shape())),
        };
        (Rule::new(op).following(remembered(tensor)), Spec::new(tensor.shape(), tensor.dtype()))
    };
    apply(Call::light(name), (tensor, indices, value), outline, move |(x, i, v), _| body(x, i, v))
}

/// Rows of `dim`, by a list of indices.
pub(crate) fn select<B: Member, K: Kind<B>, I: Kind<B>>(
    name: &'static str,
    tensor: ReplicaTensor<B, K>,
    dim: usize,
    indices: ReplicaTensor<B, I>,
    body: impl Fn(K::Primitive, I::Primitive) -> K::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, K> {
    let outline = |(tensor, indices): &(ReplicaTensor<B, K>, ReplicaTensor<B, I>)| {
        let num_indices = indices.shape().num_elements();
        let is_kept = shared_dim(tensor).is_some_and(|shared| shared != dim);
        let rule = match !is_kept && shared_dim(indices) == Some(0) {
            true => Rule::new(rows(vec![None, Some(0)], vec![Some(dim)])),
            false => Rule::new(aligned(vec![dim])).planned(1).linear_in(0),
        };
        (rule, Spec::inferred(with_length(tensor.shape(), dim, num_indices), tensor.dtype()))
    };
    note(&tensor);
    apply(Call::light(name), (tensor, indices), outline, move |(x, i), _| body(x, i))
}

/// `value` combined into rows of `dim`, by a list of indices.
pub(crate) fn select_assign<B: Member, K: Kind<B>, I: Kind<B>>(
    name: &'static str,
    tensor: ReplicaTensor<B, K>,
    dim: usize,
    indices: ReplicaTensor<B, I>,
    value: ReplicaTensor<B, K>,
    body: impl Fn(K::Primitive, I::Primitive, K::Primitive) -> K::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, K> {
    let outline = |(tensor, value, indices): &Indexed<B, K, K, I>| {
        let by_rows = shared_dim(value) == Some(dim) || shared_dim(value).is_none() && shared_dim(indices) == Some(0);
        let rule = match adds_to_zeros(tensor) && by_rows {
            true => Rule::new(rows(vec![None, Some(dim), Some(0)], vec![None])),
            false => Rule::new(aligned(vec![dim])).planned(2),
        };
        (rule, Spec::new(tensor.shape(), tensor.dtype()))
    };
    apply(Call::light(name), (tensor, value, indices), outline, move |(x, v, i), _| body(x, i, v))
}

/// Slices of `tensor`: the coordinates in the last dim of `indices` say where in its first dims.
pub(crate) fn gather_nd<B: Member, K: Kind<B>, I: Kind<B>>(
    name: &'static str,
    tensor: ReplicaTensor<B, K>,
    indices: ReplicaTensor<B, I>,
    body: impl Fn(K::Primitive, I::Primitive) -> K::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, K> {
    let outline = |(tensor, indices): &(ReplicaTensor<B, K>, ReplicaTensor<B, I>)| {
        let Some(Coordinates { num, num_dims }) = Coordinates::new(&tensor.shape(), &indices.shape()) else {
            return (whole(), Spec::Unknown);
        };
        let op = match (shared_dim(tensor), shared_dim(indices)) {
            (Some(dim), _) if dim >= num => rows(vec![Some(dim), None], vec![Some(num_dims + dim - num)]),
            (_, Some(dim)) if dim < num_dims => rows(vec![None, Some(dim)], vec![Some(dim)]),
            _ if num_dims > 0 => rows(vec![None, Some(0)], vec![Some(0)]),
            _ => rows(vec![Some(num), None], vec![Some(0)]),
        };
        let shape: Vec<usize> = indices.shape()[..num_dims].iter().chain(&tensor.shape()[num..]).copied().collect();
        (Rule::new(op).linear_in(0), Spec::new(shape, tensor.dtype()))
    };
    note(&tensor);
    apply(Call::light(name), (tensor, indices), outline, move |(x, i), _| body(x, i))
}

/// Slices combined into `tensor`, where the coordinates in the last dim of `indices` say.
pub(crate) fn scatter_nd<B: Member, K: Kind<B>, I: Kind<B>>(
    name: &'static str,
    tensor: ReplicaTensor<B, K>,
    indices: ReplicaTensor<B, I>,
    value: ReplicaTensor<B, K>,
    update: IndexingUpdateOp,
    body: impl Fn(K::Primitive, I::Primitive, K::Primitive) -> K::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, K> {
    let outline = |(tensor, indices, value): &Indexed<B, K, I, K>| {
        let shape = tensor.shape();
        let spec = Spec::new(shape.clone(), tensor.dtype());
        let Some(Coordinates { num, num_dims }) = Coordinates::new(&shape, &indices.shape()) else {
            return (whole(), spec);
        };
        let beside = |dim: usize| rows(vec![Some(dim), None, Some(num_dims + dim - num)], vec![Some(dim)]);
        let adds = matches!(update, IndexingUpdateOp::Add) && adds_to_zeros(tensor);
        let mut shared = [shared_dim(value), shared_dim(indices)].into_iter().flatten();
        let longest = (num..shape.num_dims()).max_by_key(|&dim| shape[dim]);
        let op = match (shared_dim(tensor), shared_dim(value)) {
            (Some(dim), _) if dim >= num => beside(dim),
            (_, Some(dim)) if dim >= num_dims => beside(num + dim - num_dims),
            _ => match (shared.find(|&dim| adds && dim < num_dims), longest) {
                (Some(dim), _) => rows(vec![None, Some(dim), Some(dim)], vec![None]),
                (None, Some(dim)) => beside(dim),
                (None, None) => Op::Whole { num_outputs: 1 },
            },
        };
        (Rule::new(op), spec)
    };
    apply(Call::light(name), (tensor, indices, value), outline, move |(x, i, v), _| body(x, i, v))
}

/// How the indices of [`gather_nd`] and [`scatter_nd`] speak of a tensor.
struct Coordinates {
    /// How many dims of the tensor they point into: its first ones.
    num: usize,
    /// How many dims hold them.
    num_dims: usize,
}

impl Coordinates {
    /// `None` if they do not fit, point nowhere, or pick a single element: the inner backend knows what comes of that.
    fn new(tensor: &Shape, indices: &Shape) -> Option<Self> {
        let num_dims = indices.num_dims().checked_sub(1)?;
        let num = indices[num_dims];
        (num > 0 && num <= tensor.num_dims() && num_dims + tensor.num_dims() > num).then_some(Self { num, num_dims })
    }
}

/// Windows of a dim, in a new last dim.
pub(crate) fn unfold<B: Member, K: Kind<B>>(
    name: &'static str,
    tensor: ReplicaTensor<B, K>,
    dim: usize,
    size: usize,
    step: usize,
    body: impl Fn(K::Primitive) -> K::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, K> {
    let shape = match length(&tensor.shape(), dim) >= size && step > 0 {
        true => Ok(calculate_unfold_shape(tensor.shape(), dim, size, step)),
        false => {
            Err(MetadataError::Invalid { reason: format!("no window of {size} by steps of {step} fits dim {dim}") })
        }
    };
    apply(
        Call::light(name),
        (tensor,),
        |(tensor,)| (Rule::new(aligned(vec![dim])), Spec::inferred(shape, tensor.dtype())),
        move |(x,), _| body(x),
    )
}

/// One dim reduced to length 1. The body learns whether its result will be summed over the members.
#[inline(always)]
pub(crate) fn reduce_dim<B: Member, I: Kind<B>, O: Kind<B>>(
    name: &'static str,
    tensor: ReplicaTensor<B, I>,
    dim: usize,
    reduction: Reduction,
    dtype: impl Into<DType>,
    body: impl Fn(I::Primitive, &Part) -> O::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, O> {
    apply(
        Call::light(name),
        (tensor,),
        |(tensor,)| {
            let shape = tensor.shape();
            let num_rows = length(&shape, dim);
            let dtype = dtype.into();
            let reduced = has_extreme(reduction, num_rows, dtype).and_then(|()| with_length(shape, dim, 1));
            (Rule::new(Op::Reduce { dim, reduction }), Spec::inferred(reduced, dtype))
        },
        move |(x,), part| body(x, part),
    )
}

/// Everything reduced to one element. The body learns whether its result will be summed over the members.
pub(crate) fn reduce_all<B: Member, I: Kind<B>, O: Kind<B>>(
    name: &'static str,
    tensor: ReplicaTensor<B, I>,
    reduction: Reduction,
    dtype: impl Into<DType>,
    body: impl Fn(I::Primitive, &Part) -> O::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, O> {
    apply(
        Call::light(name),
        (tensor,),
        |(tensor,)| {
            let (dtype, num_elements) = (dtype.into(), tensor.shape().num_elements());
            let reduced = has_extreme(reduction, num_elements, dtype).map(|()| Shape::from([1]));
            (Rule::new(Op::ReduceAll { reduction }), Spec::inferred(reduced, dtype))
        },
        move |(x,), part| body(x, part),
    )
}

/// Nothing has no largest element; but none of nothing holds, and all of it.
fn has_extreme(reduction: Reduction, num: usize, dtype: DType) -> Result<(), MetadataError> {
    match reduction {
        Reduction::Max | Reduction::Min if num == 0 && !matches!(dtype, DType::Bool(_)) => {
            Err(MetadataError::Invalid { reason: "the largest or smallest of no elements".to_owned() })
        }
        Reduction::Max | Reduction::Min | Reduction::Sum | Reduction::Mean | Reduction::Whole => Ok(()),
    }
}

/// `[.., m, k] x [.., k, n]`.
pub(crate) fn matmul<B: Member, K: Kind<B>>(
    name: &'static str,
    lhs: ReplicaTensor<B, K>,
    rhs: ReplicaTensor<B, K>,
    body: impl Fn(K::Primitive, K::Primitive) -> K::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, K> {
    let multiply_adds = lhs.shape().num_elements() * rhs.shape().last().copied().unwrap_or(0);
    let outline = |(lhs, rhs): &(ReplicaTensor<B, K>, ReplicaTensor<B, K>)| {
        let shape =
            same_dtype(&[lhs.dtype(), rhs.dtype()]).and_then(|()| calculate_matmul_output(&lhs.shape(), &rhs.shape()));
        (Rule::new(Op::Matmul), Spec::inferred(shape, lhs.dtype()))
    };
    apply(Call::heavy(name, multiply_adds), (lhs, rhs), outline, move |(x, y), _| body(x, y))
}

/// No rule: inputs are gathered, and every member runs the operation whole.
pub(crate) fn whole() -> Rule {
    Rule::new(Op::Whole { num_outputs: 1 })
}

/// An op family that is shared out along one of `dims`, preferred first.
pub(crate) fn batch_shared(dims: Vec<usize>, roles: Vec<Role>, outputs: Vec<Yield>) -> Op {
    Op::Batched { dims, roles, outputs }
}

/// An op family whose rows lie along another dim in each tensor.
pub(crate) fn rows(inputs: Vec<Option<usize>>, outputs: Vec<Option<usize>>) -> Op {
    Op::Rows { inputs, outputs }
}

/// Rows of `dim`, and those again, `times` in all.
pub(crate) fn repeat_dim<B: Member, K: Kind<B>>(
    [repeat, join]: [&'static str; 2],
    tensor: ReplicaTensor<B, K>,
    dim: usize,
    times: usize,
    repeated: impl Fn(K::Primitive) -> K::Primitive + Send + Sync + 'static,
    joined: impl Fn(Vec<K::Primitive>, usize) -> K::Primitive + Send + Sync + 'static,
) -> ReplicaTensor<B, K> {
    /// Each copy is exchanged for itself; for more of them it is cheaper to bring another dim between the members.
    const MOST_JOINED: usize = 4;
    if shared_dim(&tensor) == Some(dim) && (1..=MOST_JOINED).contains(&times) {
        return cat(join, vec![tensor; times], dim, joined);
    }
    let (length, dtype) = (length(&tensor.shape(), dim) * times, tensor.dtype());
    along(repeat, tensor, dim, length, dtype, repeated)
}

/// The dim that the members share.
pub(crate) fn shared_dim<B: Member, K: Kind<B>>(tensor: &ReplicaTensor<B, K>) -> Option<usize> {
    match tensor.placement() {
        Placement::Shard { dim, .. } => Some(*dim),
        Placement::Local | Placement::Fill | Placement::Replicate | Placement::Partial { .. } => None,
    }
}

/// Whether what is added to `tensor` may be added up by each member apart: it is the gradient of what was picked. Halves
/// are summed whole.
fn adds_to_zeros<B: Member, K: Kind<B>>(tensor: &ReplicaTensor<B, K>) -> bool {
    tensor.is_zero_fill() && !matches!(tensor.dtype(), DType::F16 | DType::BF16)
}

/// Length of `dim`; 0 if there is no such dim, which shape inference then reports.
pub(crate) fn length(shape: &Shape, dim: usize) -> usize {
    shape.get(dim).copied().unwrap_or(0)
}

/// An op family whose dims line up, but for the blocked ones.
pub(crate) fn aligned(blocked: Vec<usize>) -> Op {
    Op::Aligned { blocked, num_outputs: 1 }
}

pub(crate) fn broadcast(shapes: &[&Shape]) -> Result<Shape, MetadataError> {
    Shape::broadcast_many(shapes.iter().copied())
}

pub(crate) fn with_length(mut shape: Shape, dim: usize, length: usize) -> Result<Shape, MetadataError> {
    let rank = shape.num_dims();
    let slot = shape.get_mut(dim).ok_or(MetadataError::OutOfBounds { dim, rank })?;
    *slot = length;
    Ok(shape)
}

pub(crate) fn same_dtype(dtypes: &[DType]) -> Result<(), MetadataError> {
    match dtypes.iter().find(|dtype| **dtype != dtypes[0]) {
        None => Ok(()),
        Some(other) => Err(MetadataError::Invalid { reason: format!("dtypes {:?} and {other:?} differ", dtypes[0]) }),
    }
}

/// Dims on which a gather or scatter cannot be shared: its own, and those where index and tensor differ.
fn blocked_by_indexing(dim: usize, tensor: &Shape, indices: &Shape) -> Vec<usize> {
    let differs = |other: &usize| *other == dim || tensor.get(*other) != indices.get(*other);
    (0..tensor.num_dims().max(indices.num_dims())).filter(differs).collect()
}
