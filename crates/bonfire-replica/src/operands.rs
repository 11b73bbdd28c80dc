//! What goes into an operation and comes out of it, with and without its kinds.

use crate::{
    Member,
    execute::Spec,
    tensor::{ReplicaTensor, Tensor},
    value::{Full, Kind, Value},
};

/// The inputs of an operation: a tuple of tensors and optional tensors, or a list.
pub(crate) trait Inputs<B: Member> {
    /// The same of the inner backend.
    type Primitives;
    fn erase(self) -> Vec<Option<Tensor<B>>>;
    fn restore(values: Vec<Option<Value<B>>>) -> Self::Primitives;
}

/// One of the [`Inputs`].
pub(crate) trait Input<B: Member> {
    type Primitive;
    fn erase(self) -> Option<Tensor<B>>;
    fn restore(value: Option<Value<B>>) -> Self::Primitive;
}

impl<B: Member, K: Kind<B>> Input<B> for ReplicaTensor<B, K> {
    type Primitive = K::Primitive;

    fn erase(self) -> Option<Tensor<B>> {
        Some(self.tensor)
    }

    fn restore(value: Option<Value<B>>) -> Self::Primitive {
        K::restore(value.expect("a required input"))
    }
}

impl<B: Member, K: Kind<B>> Input<B> for Option<ReplicaTensor<B, K>> {
    type Primitive = Option<K::Primitive>;

    fn erase(self) -> Option<Tensor<B>> {
        self.map(|input| input.tensor)
    }

    fn restore(value: Option<Value<B>>) -> Self::Primitive {
        value.map(K::restore)
    }
}

impl<B: Member, K: Kind<B>> Inputs<B> for Vec<ReplicaTensor<B, K>> {
    type Primitives = Vec<K::Primitive>;

    fn erase(self) -> Vec<Option<Tensor<B>>> {
        self.into_iter().map(Input::erase).collect()
    }

    fn restore(values: Vec<Option<Value<B>>>) -> Self::Primitives {
        values.into_iter().map(<ReplicaTensor<B, K> as Input<B>>::restore).collect()
    }
}

macro_rules! inputs {
    ($($input:ident),+) => {
        impl<B: Member, $($input: Input<B>),+> Inputs<B> for ($($input,)+) {
            type Primitives = ($($input::Primitive,)+);

            fn erase(self) -> Vec<Option<Tensor<B>>> {
                #[allow(non_snake_case)]
                let ($($input,)+) = self;
                vec![$($input.erase()),+]
            }

            fn restore(values: Vec<Option<Value<B>>>) -> Self::Primitives {
                let mut values = values.into_iter();
                ($($input::restore(values.next().flatten()),)+)
            }
        }
    };
}

inputs!(I0);
inputs!(I0, I1);
inputs!(I0, I1, I2);
inputs!(I0, I1, I2, I3);
inputs!(I0, I1, I2, I3, I4);
inputs!(I0, I1, I2, I3, I4, I5);

/// The results of an operation: a tensor, a pair of tensors, or a list of one kind.
pub(crate) trait Outputs<B: Member>: Sized {
    /// One [`Spec`] per result.
    type Specs;
    type Primitives;
    fn specs(specs: Self::Specs) -> Vec<Spec>;
    fn erase(results: Self::Primitives) -> Vec<Value<B>>;
    fn restore(tensors: Vec<Tensor<B>>) -> Self;
    fn full(index: usize) -> Full<B>;
}

impl<B: Member, K: Kind<B>> Outputs<B> for ReplicaTensor<B, K> {
    type Specs = Spec;
    type Primitives = K::Primitive;

    fn specs(spec: Spec) -> Vec<Spec> {
        vec![spec]
    }

    fn erase(result: K::Primitive) -> Vec<Value<B>> {
        vec![K::erase(result)]
    }

    fn restore(tensors: Vec<Tensor<B>>) -> Self {
        Self::new(tensors.into_iter().next().expect("one result"))
    }

    fn full(_index: usize) -> Full<B> {
        K::full
    }
}

impl<B: Member, K: Kind<B>, L: Kind<B>> Outputs<B> for (ReplicaTensor<B, K>, ReplicaTensor<B, L>) {
    type Specs = (Spec, Spec);
    type Primitives = (K::Primitive, L::Primitive);

    fn specs((first, second): Self::Specs) -> Vec<Spec> {
        vec![first, second]
    }

    fn erase((first, second): Self::Primitives) -> Vec<Value<B>> {
        vec![K::erase(first), L::erase(second)]
    }

    fn restore(tensors: Vec<Tensor<B>>) -> Self {
        let mut tensors = tensors.into_iter();
        let mut next = || tensors.next().expect("two results");
        (ReplicaTensor::new(next()), ReplicaTensor::new(next()))
    }

    fn full(index: usize) -> Full<B> {
        if index == 0 { K::full } else { L::full }
    }
}

impl<B: Member, K: Kind<B>> Outputs<B> for Vec<ReplicaTensor<B, K>> {
    type Specs = Vec<Spec>;
    type Primitives = Vec<K::Primitive>;

    fn specs(specs: Vec<Spec>) -> Vec<Spec> {
        specs
    }

    fn erase(results: Self::Primitives) -> Vec<Value<B>> {
        results.into_iter().map(K::erase).collect()
    }

    fn restore(tensors: Vec<Tensor<B>>) -> Self {
        tensors.into_iter().map(ReplicaTensor::new).collect()
    }

    fn full(_index: usize) -> Full<B> {
        K::full
    }
}
