//! Methods that differ by their name alone, in lists.
//!
//! Each takes Burn's alias of the tensors and the names of methods that the inner backend has too.

/// Elementwise, dtype kept.
macro_rules! unary_methods {
    ($tensor:ident: $($name:ident)*) => {$(
        fn $name(tensor: $tensor<Self>) -> $tensor<Self> {
            let dtype = tensor.dtype();
            unary(stringify!($name), tensor, dtype, B::$name)
        }
    )*};
}

/// Elementwise with a scalar, dtype kept.
macro_rules! scalar_methods {
    ($tensor:ident: $($name:ident)*) => {$(
        fn $name(lhs: $tensor<Self>, rhs: Scalar) -> $tensor<Self> {
            let dtype = lhs.dtype();
            unary(stringify!($name), lhs, dtype, move |x| B::$name(x, rhs))
        }
    )*};
}

/// Elementwise on two tensors, dtype kept.
macro_rules! binary_methods {
    ($tensor:ident: $($name:ident)*) => {$(
        fn $name(lhs: $tensor<Self>, rhs: $tensor<Self>) -> $tensor<Self> {
            let dtype = lhs.dtype();
            arithmetic(stringify!($name), lhs, rhs, dtype, B::$name)
        }
    )*};
}

/// Elementwise on two tensors, to a bool tensor.
macro_rules! compare_methods {
    ($tensor:ident: $($name:ident)*) => {$(
        fn $name(lhs: $tensor<Self>, rhs: $tensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> {
            arithmetic(stringify!($name), lhs, rhs, out_dtype, move |x, y| B::$name(x, y, out_dtype))
        }
    )*};
}

/// The sum or difference of two tensors.
macro_rules! additive_methods {
    ($tensor:ident: $($name:ident)*) => {$(
        fn $name(lhs: $tensor<Self>, rhs: $tensor<Self>) -> $tensor<Self> {
            additive(stringify!($name), lhs, rhs, B::$name)
        }
    )*};
}

/// Elementwise with a scalar, to a bool tensor.
macro_rules! compare_scalar_methods {
    ($tensor:ident: $($name:ident)*) => {$(
        fn $name(lhs: $tensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self> {
            unary(stringify!($name), lhs, out_dtype, move |x| B::$name(x, rhs, out_dtype))
        }
    )*};
}

/// To one element.
macro_rules! reduce_all_methods {
    ($tensor:ident: $($name:ident $reduction:ident)*) => {$(
        fn $name(tensor: $tensor<Self>) -> $tensor<Self> {
            let dtype = tensor.dtype();
            reduce_all(stringify!($name), tensor, Reduction::$reduction, dtype, |x, _| B::$name(x))
        }
    )*};
}

/// One dim to length 1.
macro_rules! reduce_dim_methods {
    ($tensor:ident: $($name:ident $reduction:ident)*) => {$(
        fn $name(tensor: $tensor<Self>, dim: usize) -> $tensor<Self> {
            let dtype = tensor.dtype();
            reduce_dim(stringify!($name), tensor, dim, Reduction::$reduction, dtype, move |x, _| B::$name(x, dim))
        }
    )*};
}

/// Along a dim that must be whole, shape and dtype kept.
macro_rules! along_methods {
    ($tensor:ident: $($name:ident)*) => {$(
        fn $name(tensor: $tensor<Self>, dim: usize) -> $tensor<Self> {
            let (shape, dtype) = (tensor.shape(), tensor.dtype());
            along(stringify!($name), tensor, dim, length(&shape, dim), dtype, move |x| B::$name(x, dim))
        }
    )*};
}

/// Moves of elements, in this order: transpose, swap_dims, permute, flip, reshape, expand, repeat_dim, unfold, slice,
/// slice_assign, cat, gather, select.
macro_rules! view_methods {
    (
        $tensor:ident: $transpose:ident $swap_dims:ident $permute:ident $flip:ident $reshape:ident $expand:ident
        $repeat_dim:ident $unfold:ident $slice:ident $slice_assign:ident $cat:ident $gather:ident $select:ident
    ) => {
        fn $transpose(tensor: $tensor<Self>) -> $tensor<Self> {
            let rank = tensor.rank();
            swap_dims(stringify!($transpose), tensor, rank.wrapping_sub(2), rank.wrapping_sub(1), B::$transpose)
        }

        fn $swap_dims(tensor: $tensor<Self>, dim1: usize, dim2: usize) -> $tensor<Self> {
            swap_dims(stringify!($swap_dims), tensor, dim1, dim2, move |x| B::$swap_dims(x, dim1, dim2))
        }

        fn $permute(tensor: $tensor<Self>, axes: &[usize]) -> $tensor<Self> {
            permute(stringify!($permute), tensor, axes, B::$permute)
        }

        fn $flip(tensor: $tensor<Self>, axes: &[usize]) -> $tensor<Self> {
            flip(stringify!($flip), tensor, axes, B::$flip)
        }

        fn $reshape(tensor: $tensor<Self>, shape: Shape) -> $tensor<Self> {
            reshape(stringify!($reshape), tensor, shape, B::$reshape)
        }

        fn $expand(tensor: $tensor<Self>, shape: Shape) -> $tensor<Self> {
            expand(stringify!($expand), tensor, shape, B::$expand)
        }

        fn $repeat_dim(tensor: $tensor<Self>, dim: usize, times: usize) -> $tensor<Self> {
            let names = [stringify!($repeat_dim), stringify!($cat)];
            repeat_dim(names, tensor, dim, times, move |x| B::$repeat_dim(x, dim, times), B::$cat)
        }

        fn $unfold(tensor: $tensor<Self>, dim: usize, size: usize, step: usize) -> $tensor<Self> {
            unfold(stringify!($unfold), tensor, dim, size, step, move |x| B::$unfold(x, dim, size, step))
        }

        fn $slice(tensor: $tensor<Self>, slices: &[Slice]) -> $tensor<Self> {
            slice(stringify!($slice), tensor, slices, B::$slice)
        }

        fn $slice_assign(tensor: $tensor<Self>, slices: &[Slice], value: $tensor<Self>) -> $tensor<Self> {
            slice_assign(stringify!($slice_assign), tensor, slices, value, B::$slice_assign)
        }

        fn $cat(tensors: Vec<$tensor<Self>>, dim: usize) -> $tensor<Self> {
            cat(stringify!($cat), tensors, dim, B::$cat)
        }

        fn $gather(dim: usize, tensor: $tensor<Self>, indices: IntTensor<Self>) -> $tensor<Self> {
            gather(stringify!($gather), dim, tensor, indices, move |x, i| B::$gather(dim, x, i))
        }

        fn $select(tensor: $tensor<Self>, dim: usize, indices: IntTensor<Self>) -> $tensor<Self> {
            select(stringify!($select), tensor, dim, indices, move |x, i| B::$select(x, dim, i))
        }
    };
}
