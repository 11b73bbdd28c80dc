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
