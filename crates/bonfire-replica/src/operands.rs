//! What goes into an operation and comes out of it, with and without its kinds.

use crate::{
    Member, ReplicaDevice,
    execute::Spec,
    tensor::{ReplicaTensor, Tensor},
    value::{Full, Kind, Value},
};

/// The inputs of an operation: a tuple of tensors and optional tensors, or a list.
pub(crate) trait Inputs<B: Member> {
    /// The same of the inner backend.
    type Primitives;
    /// The device of all of them.
    ///
    /// # Panics
    ///
    /// If they are on different devices.
    fn device(&self, operation: &str) -> &ReplicaDevice<B>;
    /// Whether all of them are at home, with no more to do than to hand them over.
    fn is_home(&self) -> bool;
    /// # Panics
    ///
    /// If one of them is spread.
    fn into_home(self) -> Self::Primitives;
    fn erase(self) -> Vec<Option<Tensor<B>>>;
    fn restore(values: Vec<Option<Value<B>>>) -> Self::Primitives;
}

/// One of the [`Inputs`].
pub(crate) trait Input<B: Member> {
    type Primitive;
    fn device(&self) -> Option<&ReplicaDevice<B>>;
    fn is_home(&self) -> bool;
    fn into_home(self) -> Self::Primitive;
    fn erase(self) -> Option<Tensor<B>>;
    fn restore(value: Option<Value<B>>) -> Self::Primitive;
}

impl<B: Member, K: Kind<B>> Input<B> for ReplicaTensor<B, K> {
    type Primitive = K::Primitive;

    fn device(&self) -> Option<&ReplicaDevice<B>> {
        Some(self.device_ref())
    }

    fn is_home(&self) -> bool {
        ReplicaTensor::is_home(self)
    }

    fn into_home(self) -> Self::Primitive {
        ReplicaTensor::into_home(self)
    }

    fn erase(self) -> Option<Tensor<B>> {
        Some(ReplicaTensor::erase(self))
    }

    fn restore(value: Option<Value<B>>) -> Self::Primitive {
        K::restore(value.expect("a required input"))
    }
}

impl<B: Member, K: Kind<B>> Input<B> for Option<ReplicaTensor<B, K>> {
    type Primitive = Option<K::Primitive>;

    fn device(&self) -> Option<&ReplicaDevice<B>> {
        self.as_ref().and_then(Input::device)
    }

    fn is_home(&self) -> bool {
        self.as_ref().is_none_or(Input::is_home)
    }

    fn into_home(self) -> Self::Primitive {
        self.map(Input::into_home)
    }

    fn erase(self) -> Option<Tensor<B>> {
        self.map(ReplicaTensor::erase)
    }

    fn restore(value: Option<Value<B>>) -> Self::Primitive {
        value.map(K::restore)
    }
}

impl<B: Member, K: Kind<B>> Inputs<B> for Vec<ReplicaTensor<B, K>> {
    type Primitives = Vec<K::Primitive>;

    fn device(&self, operation: &str) -> &ReplicaDevice<B> {
        common_device(operation, self.iter().map(Input::device))
    }

    fn is_home(&self) -> bool {
        self.iter().all(Input::is_home)
    }

    fn into_home(self) -> Self::Primitives {
        self.into_iter().map(Input::into_home).collect()
    }

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

            fn device(&self, operation: &str) -> &ReplicaDevice<B> {
                #[allow(non_snake_case)]
                let ($($input,)+) = self;
                common_device(operation, [$($input.device()),+].into_iter())
            }

            fn is_home(&self) -> bool {
                #[allow(non_snake_case)]
                let ($($input,)+) = self;
                $($input.is_home())&&+
            }

            fn into_home(self) -> Self::Primitives {
                #[allow(non_snake_case)]
                let ($($input,)+) = self;
                ($($input.into_home(),)+)
            }

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
    /// Results that are at home.
    fn at_home(results: Self::Primitives, device: &ReplicaDevice<B>) -> Self;
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

    fn at_home(result: K::Primitive, device: &ReplicaDevice<B>) -> Self {
        ReplicaTensor::at_home(result, device)
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

    fn at_home((first, second): Self::Primitives, device: &ReplicaDevice<B>) -> Self {
        (Outputs::at_home(first, device), Outputs::at_home(second, device))
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

    fn at_home(results: Self::Primitives, device: &ReplicaDevice<B>) -> Self {
        results.into_iter().map(|result| Outputs::at_home(result, device)).collect()
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

/// # Panics
///
/// If the inputs are on different devices.
fn common_device<'a, B: Member>(
    operation: &str,
    devices: impl Iterator<Item = Option<&'a ReplicaDevice<B>>>,
) -> &'a ReplicaDevice<B> {
    let mut devices = devices.flatten();
    let first = devices.next().expect("an operation has an input");
    for other in devices {
        assert!(
            first == other,
            "{operation}: one tensor is on {first:?}, another on {other:?}; move them to one device with to_device first"
        );
    }
    first
}
