//! A rank's own sum of gradients over the micro steps of a window, on its device.

use std::{
    collections::HashMap,
    mem,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use burn::{
    module::ParamId,
    optim::GradientsParams,
    tensor::{
        DType, FloatDType, Tensor, TensorData, TensorMetadata, TensorPrimitive, TransactionPrimitive, backend::Backend,
        try_read_sync,
    },
};
use crossbeam_channel::Sender;

use crate::{
    Parameter, TrainError,
    reducer::{Gradient, Message},
    window::Weights,
};

/// Takes gradients during the backward pass that makes them, and never waits.
///
/// `B` is the inner backend, on which gradients are.
pub trait GradientSink<B: Backend>: Send + Sync {
    /// Takes the gradient of a parameter: the whole of it, once in a backward pass.
    ///
    /// Parameters that are not trained are ignored.
    fn ready(&self, id: ParamId, gradient: B::FloatTensorPrimitive);
}

/// Sums of gradients by parameter, weighted.
pub(crate) struct Accumulator<B: Backend> {
    parameters: Arc<[Parameter]>,
    pub(crate) weights: Weights,
    sums: Vec<Option<B::FloatTensorPrimitive>>,
}

impl<B: Backend> Accumulator<B> {
    pub(crate) fn new(parameters: Arc<[Parameter]>) -> Self {
        let sums = parameters.iter().map(|_| None).collect();
        Self { parameters, weights: Weights::default(), sums }
    }

    /// Adds the gradients of a micro step; gives how many belong to no parameter.
    pub(crate) fn add(&mut self, mut gradients: GradientsParams, weight: f64) -> usize {
        let factor = self.weights.add(weight);
        for (parameter, sum) in self.parameters.iter().zip(&mut self.sums) {
            let Some(gradient) = gradients.remove::<B, 1>(parameter.id) else { continue };
            if let Some(factor) = factor {
                *sum = Some(plus::<B>(sum.take(), gradient.into_primitive().tensor(), factor));
            }
        }
        gradients.len()
    }

    /// The sum of a parameter's gradients, if it had any.
    pub(crate) fn take(&mut self, parameter: usize) -> Option<B::FloatTensorPrimitive> {
        self.sums[parameter].take()
    }

    /// The sums of those of some parameters that have any, in host memory: the device is waited for once.
    pub(crate) fn read(&mut self, parameters: &[usize]) -> Result<Vec<(usize, TensorData)>, TrainError> {
        let (used, sums): (Vec<usize>, Vec<_>) =
            parameters.iter().filter_map(|&parameter| Some((parameter, self.take(parameter)?))).unzip();
        let Some(&first) = used.first() else { return Ok(Vec::new()) };
        let transaction = TransactionPrimitive::new(sums, vec![], vec![], vec![]);
        match try_read_sync(B::tr_execute(transaction)) {
            Some(Ok(data)) => Ok(used.into_iter().zip(data.read_floats).collect()),
            Some(Err(error)) => Err(self.unreadable(first, format!("{error:?}"))),
            None => Err(self.unreadable(first, "the backend cannot be waited for".into())),
        }
    }

    fn unreadable(&self, first: usize, reason: String) -> TrainError {
        TrainError::Read { parameter: self.parameters[first].name.clone(), reason }
    }

    /// Ends the window: gives its weights, and drops what is left.
    pub(crate) fn end(&mut self) -> Weights {
        self.sums.fill_with(|| None);
        mem::take(&mut self.weights)
    }

    /// Moves the sums to where the last micro step of the window, of `weight`, adds to them while it runs.
    ///
    /// With somewhere to send them each goes on its way at once; else they stay until they are reclaimed.
    pub(crate) fn sink(&mut self, weight: f64, messages: Option<Sender<Message>>) -> Sink<B> {
        Sink {
            places: self.parameters.iter().enumerate().map(|(place, parameter)| (parameter.id, place)).collect(),
            factor: self.weights.add(weight),
            sums: Mutex::new(self.sums.iter_mut().map(Option::take).collect()),
            is_given: self.parameters.iter().map(|_| AtomicBool::new(false)).collect(),
            is_closed: AtomicBool::new(false),
            came_twice: Mutex::new(None),
            parameters: self.parameters.clone(),
            messages,
        }
    }

    /// Takes back what has not been sent; gradients that come later are ignored.
    pub(crate) fn reclaim(&mut self, sink: &Sink<B>) {
        sink.is_closed.store(true, Ordering::Release);
        self.sums = sink.sums().iter_mut().map(Option::take).collect();
    }
}

/// The sums of a window whose last micro step is running.
pub(crate) struct Sink<B: Backend> {
    parameters: Arc<[Parameter]>,
    places: HashMap<ParamId, usize>,
    factor: Option<f64>,
    sums: Mutex<Vec<Option<B::FloatTensorPrimitive>>>,
    is_given: Vec<AtomicBool>,
    /// The window has ended.
    is_closed: AtomicBool,
    came_twice: Mutex<Option<usize>>,
    messages: Option<Sender<Message>>,
}

impl<B: Backend> Sink<B> {
    /// The first parameter whose gradient came twice.
    pub(crate) fn came_twice(&self) -> Option<usize> {
        *self.came_twice.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sums(&self) -> MutexGuard<'_, Vec<Option<B::FloatTensorPrimitive>>> {
        self.sums.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: Backend> GradientSink<B> for Sink<B> {
    fn ready(&self, id: ParamId, gradient: B::FloatTensorPrimitive) {
        let (Some(&parameter), Some(factor)) = (self.places.get(&id), self.factor) else { return };
        if self.is_closed.load(Ordering::Acquire) {
            return;
        }
        if self.is_given[parameter].swap(true, Ordering::AcqRel) {
            self.came_twice.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(parameter);
            return;
        }
        let sum = self.sums()[parameter].take();
        let Some(messages) = &self.messages else {
            self.sums()[parameter] = Some(plus::<B>(sum, gradient, factor));
            return;
        };
        let name = self.parameters[parameter].name.clone();
        // The other thread computes and waits for the device: autodiff's graph is locked here.
        let read = Box::new(move || read::<B>(plus::<B>(sum, gradient, factor), &name));
        // If the thread has ended, whoever closes the window learns why.
        let _ = messages.send(Message::Gradient { parameter, gradient: Gradient::There(read) });
    }
}

/// `sum + factor * gradient`; exactly `sum + gradient` if the factor is 1.
///
/// Halves are summed in f32: many small gradients would be lost in a large sum, and many large ones overflow.
fn plus<B: Backend>(
    sum: Option<B::FloatTensorPrimitive>,
    gradient: B::FloatTensorPrimitive,
    factor: f64,
) -> B::FloatTensorPrimitive {
    if sum.is_none() && factor == 1.0 {
        return gradient;
    }
    let gradient = widened::<B>(gradient);
    let gradient = if factor == 1.0 { gradient } else { B::float_mul_scalar(gradient, factor.into()) };
    match sum {
        Some(sum) => B::float_add(widened::<B>(sum), gradient),
        None => gradient,
    }
}

fn widened<B: Backend>(tensor: B::FloatTensorPrimitive) -> B::FloatTensorPrimitive {
    if matches!(tensor.dtype(), DType::F16 | DType::BF16) { B::float_cast(tensor, FloatDType::F32) } else { tensor }
}

/// A gradient's values, without a copy where the backend's tensors lie in host memory.
fn read<B: Backend>(gradient: B::FloatTensorPrimitive, name: &str) -> Result<TensorData, TrainError> {
    let tensor = Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(gradient));
    tensor.try_into_data().map_err(|error| TrainError::Read { parameter: name.into(), reason: format!("{error:?}") })
}
