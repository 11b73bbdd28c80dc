//! The backend type.

use std::{marker::PhantomData, sync::Arc};

use bonfire_collectives::CollectiveError;
use burn_backend::{Backend, BackendTypes, DType, DTypeUsageSet, ExecutionError, TensorData};
use crossbeam_channel::bounded;

use crate::{
    Member, RandomMode, RandomState, ReplicaDevice, ReplicaError, ReplicaTensor,
    balance::Cost,
    group::{MemberContext, Task},
    value::{Bool, Float, Int, Quantized},
};

/// Several devices of the backend `B`, used as one.
///
/// Every operation gives what it gives on one device of `B`, up to the order in which floats are summed; placements
/// change speed, never values. Use it as any backend: `Autodiff<Replica<Flex>>` for `Autodiff<Flex>`.
///
/// ```
/// use bonfire_replica::{Replica, ReplicaDevice};
/// use burn_backend::{Distribution, Shape, ops::FloatTensorOps, FloatDType, TensorMetadata};
/// use burn_flex::{Flex, FlexDevice};
///
/// type B = Replica<Flex>;
/// let device = ReplicaDevice::new([FlexDevice, FlexDevice])?;
/// let batch = B::float_random(Shape::new([7, 4]), Distribution::Default, &device, FloatDType::F32);
/// let weight = B::float_ones(Shape::new([4, 3]), &device, FloatDType::F32);
/// assert_eq!(B::float_matmul(batch, weight).shape(), Shape::new([7, 3]));
/// # Ok::<(), bonfire_replica::ReplicaError>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Replica<B> {
    inner: PhantomData<B>,
}

impl<B: Member> BackendTypes for Replica<B> {
    type Device = ReplicaDevice<B>;
    type FloatTensorPrimitive = ReplicaTensor<B, Float>;
    type FloatElem = B::FloatElem;
    type IntTensorPrimitive = ReplicaTensor<B, Int>;
    type IntElem = B::IntElem;
    type BoolTensorPrimitive = ReplicaTensor<B, Bool>;
    type BoolElem = B::BoolElem;
    type QuantizedTensorPrimitive = ReplicaTensor<B, Quantized>;
}

impl<B: Member> Backend for Replica<B> {
    fn name(device: &Self::Device) -> String {
        format!("replica<{}> x {}", B::name(device.group.home()), device.num_members())
    }

    /// Seeds the inner backend, from whose stream all draws are made on the calling thread; or, with
    /// [`RandomMode::Counter`], this device alone.
    fn seed(device: &Self::Device, seed: u64) {
        match device.group.options.random {
            RandomMode::Stream => B::seed(device.group.home(), seed),
            RandomMode::Counter => *device.group.random() = RandomState { seed, next_draw: 0 },
        }
    }

    /// Waits until every member has run all that was enqueued so far.
    ///
    /// # Errors
    ///
    /// The group's first cause if it is broken, or the inner backend's error.
    fn sync(device: &Self::Device) -> Result<(), ExecutionError> {
        let group = &device.group;
        let failed = |cause: ReplicaError| ExecutionError::WithContext { reason: cause.to_string() };
        if let Some(cause) = group.broken() {
            return Err(failed(cause.clone()));
        }
        // Members that have nothing to do are left asleep.
        if group.needs_sync() {
            let (sender, receiver) = bounded(group.num_members());
            let num_enqueued = run_on_all(device, "sync", move |member| {
                // The caller may have given up waiting.
                let _ = sender.send((member.rank, B::sync(&member.device)));
            })
            .map_err(failed)?;
            for (_, synced) in group.collect(&receiver, 0..group.num_members()).map_err(failed)? {
                synced?;
            }
            group.synced(num_enqueued);
        }
        B::sync(group.home())
    }

    fn dtype_usage(device: &Self::Device, dtype: DType) -> DTypeUsageSet {
        B::dtype_usage(device.group.home(), dtype)
    }

    fn supports_dtype(device: &Self::Device, dtype: DType) -> bool {
        B::supports_dtype(device.group.home(), dtype)
    }

    /// One: a group is one device, whatever it is made of.
    fn device_count(_type_id: u16) -> usize {
        1
    }

    fn memory_persistent_allocations<Output: Send, Input: Send, Func: Fn(Input) -> Output + Send>(
        device: &Self::Device,
        input: Input,
        func: Func,
    ) -> Output {
        B::memory_persistent_allocations(device.group.home(), input, func)
    }

    fn memory_cleanup(device: &Self::Device) {
        B::memory_cleanup(device.group.home());
        // The members of a broken group run nothing more, cleaning included.
        let _ = run_on_all(device, "memory_cleanup", |member| B::memory_cleanup(&member.device));
    }

    fn staging<'a, Iter>(data: Iter, device: &Self::Device)
    where
        Iter: Iterator<Item = &'a mut TensorData>,
    {
        B::staging(data, device.group.home());
    }
}

/// Enqueues something that is no tensor operation; gives the number of tasks enqueued so far, this one included.
///
/// # Errors
///
/// The group's first cause, if it is broken.
pub(crate) fn run_on_all<B: Member>(
    device: &ReplicaDevice<B>,
    operation: &'static str,
    body: impl Fn(&MemberContext<B>) + Send + Sync + 'static,
) -> Result<u64, ReplicaError> {
    struct BackendTask<F> {
        operation: &'static str,
        body: F,
    }

    impl<B: Member, F: Fn(&MemberContext<B>) + Send + Sync> Task<B> for BackendTask<F> {
        fn operation(&self) -> &'static str {
            self.operation
        }

        fn cost(&self, _rank: usize) -> Cost {
            Cost::Collective
        }

        fn run(&self, member: &MemberContext<B>) -> Result<(), CollectiveError> {
            (self.body)(member);
            Ok(())
        }
    }

    let order = device.group.try_order()?;
    order.try_enqueue(Arc::new(BackendTask { operation, body }))
}
