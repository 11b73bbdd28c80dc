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
    /// Of the furthest.
    fn distance(&self) -> Distance;
    /// All of them at home, and their device.
    ///
    /// # Panics
    ///
    /// If one of them is spread.
    fn into_home(self) -> (ReplicaDevice<B>, Self::Primitives);
    fn erase(self) -> Vec<Option<Tensor<B>>>;
    fn restore(values: Vec<Option<Value<B>>>) -> Self::Primitives;
}

/// How far an input is from being a tensor of the inner backend at home.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Distance {
    /// It is one.
    Inline,
    /// It shares one with its other handles.
    Shared,
    /// It is spread, or there is more to do than to hand it over.
    Away,
}

/// One of the [`Inputs`].
pub(crate) trait Input<B: Member> {
    type Primitive;
    fn device(&self) -> Option<&ReplicaDevice<B>>;
    fn distance(&self) -> Distance;
    fn into_home(self) -> (Option<ReplicaDevice<B>>, Self::Primitive);
    fn erase(self) -> Option<Tensor<B>>;
    fn restore(value: Option<Value<B>>) -> Self::Primitive;
}

impl<B: Member, K: Kind<B>> Input<B> for ReplicaTensor<B, K> {
    type Primitive = K::Primitive;

    #[inline(always)]
    fn device(&self) -> Option<&ReplicaDevice<B>> {
        Some(self.device_ref())
    }

    #[inline(always)]
    fn distance(&self) -> Distance {
        ReplicaTensor::distance(self)
    }

    #[inline(always)]
    fn into_home(self) -> (Option<ReplicaDevice<B>>, Self::Primitive) {
        let (device, primitive) = ReplicaTensor::into_home(self);
        (Some(device), primitive)
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

    #[inline(always)]
    fn device(&self) -> Option<&ReplicaDevice<B>> {
        self.as_ref().and_then(Input::device)
    }

    #[inline(always)]
    fn distance(&self) -> Distance {
        self.as_ref().map_or(Distance::Inline, Input::distance)
    }

    #[inline(always)]
    fn into_home(self) -> (Option<ReplicaDevice<B>>, Self::Primitive) {
        self.map(ReplicaTensor::into_home).unzip()
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

    #[inline(always)]
    fn distance(&self) -> Distance {
        // Never inline: many small tensors make a large one.
        self.iter().map(Input::distance).fold(Distance::Shared, Distance::max)
    }

    fn into_home(self) -> (ReplicaDevice<B>, Self::Primitives) {
        let (devices, primitives): (Vec<_>, _) = self.into_iter().map(ReplicaTensor::into_home).unzip();
        (devices.into_iter().next().expect("an operation has an input"), primitives)
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

            #[inline(always)]
            fn device(&self, operation: &str) -> &ReplicaDevice<B> {
                #[allow(non_snake_case)]
                let ($($input,)+) = self;
                common_device(operation, [$($input.device()),+].into_iter())
            }

            #[inline(always)]
            fn distance(&self) -> Distance {
                #[allow(non_snake_case)]
                let ($($input,)+) = self;
                let mut furthest = Distance::Inline;
                $(furthest = furthest.max($input.distance());)+
                furthest
            }

            #[inline(always)]
            fn into_home(self) -> (ReplicaDevice<B>, Self::Primitives) {
                #[allow(non_snake_case)]
                let ($($input,)+) = self;
                let mut first = None;
                let primitives = ($({
                    let (device, primitive) = $input.into_home();
                    first = first.or(device);
                    primitive
                },)+);
                (first.expect("an operation has an input"), primitives)
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
    /// Results that are at home, of inputs that were no further away than `inputs`.
    fn at_home(results: Self::Primitives, device: ReplicaDevice<B>, inputs: Distance) -> Self;
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

    #[inline(always)]
    fn at_home(result: K::Primitive, device: ReplicaDevice<B>, inputs: Distance) -> Self {
        ReplicaTensor::at_home(result, device, inputs)
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

    fn at_home((first, second): Self::Primitives, device: ReplicaDevice<B>, inputs: Distance) -> Self {
        (Outputs::at_home(first, device.clone(), inputs), Outputs::at_home(second, device, inputs))
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

    fn at_home(results: Self::Primitives, device: ReplicaDevice<B>, inputs: Distance) -> Self {
        results.into_iter().map(|result| Outputs::at_home(result, device.clone(), inputs)).collect()
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
#[inline(always)]
fn common_device<'a, B: Member>(
    operation: &str,
    devices: impl Iterator<Item = Option<&'a ReplicaDevice<B>>>,
) -> &'a ReplicaDevice<B> {
    let mut devices = devices.flatten();
    let first = devices.next().expect("an operation has an input");
    for other in devices {
        if first != other {
            different_devices(operation, first, other);
        }
    }
    first
}

#[cold]
fn different_devices<B: Member>(operation: &str, first: &ReplicaDevice<B>, other: &ReplicaDevice<B>) -> ! {
    panic!(
        "{operation}: one tensor is on {first:?}, another on {other:?}; move them to one device with to_device first"
    )
}
