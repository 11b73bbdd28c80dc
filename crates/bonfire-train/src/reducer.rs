//! The thread that reduces the gradients of a window over the ranks, bucket by bucket.
//!
//! ```text
//! open    weights of all ranks                       one all_gather of 8 bytes a rank
//! give    a gradient, in any order; whenever the next bucket is complete:
//!         scale -> (narrow) -> mean over ranks -> (widen) -> scale     one all_reduce a bucket
//! close   what was not given counts as 0, on this rank; who gave what rides along with the last bucket
//! ```
//!
//! Buckets go in one order on all ranks, whatever the order in which gradients come, so a window has the same
//! collectives and the same bits whether its gradients come during backward or after it.

use core::{any::Any, ops::Range};
use std::{
    panic::{self, AssertUnwindSafe},
    sync::Arc,
    thread::{self, JoinHandle},
};

use bonfire_collectives::{Buffer, BufferMut, Communicator, ReduceOp};
use burn::tensor::{DType, TensorData};
use crossbeam_channel::{Receiver, Sender, unbounded};

use crate::{
    Parameter, TrainError,
    bucket::{self, Bucket, BucketCaps},
    window::{self, Reduction, Scales, Weights},
    wire::{self, Flat, ReduceDType},
};

const LEFT_OPEN: &str = "a window was left open";

/// The caller's end of the thread.
pub(crate) struct Reducer {
    communicator: Arc<dyn Communicator>,
    messages: Sender<Message>,
    replies: Receiver<Result<Option<Reduced>, TrainError>>,
    thread: Option<JoinHandle<()>>,
    /// The parameters of each bucket, in order.
    buckets: Arc<[Vec<usize>]>,
    is_open: bool,
}

/// What reduces how.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReducerOptions {
    pub(crate) caps: BucketCaps,
    pub(crate) dtype: ReduceDType,
    pub(crate) reduction: Reduction,
}

/// The gradients of a window, the same on every rank.
pub(crate) struct Reduced {
    /// By parameter; none where no rank had any.
    pub(crate) gradients: Vec<Option<TensorData>>,
    /// The sum of weights of all ranks.
    pub(crate) weight: f64,
}

/// What the thread is told.
pub(crate) enum Message {
    /// A window begins, to which this rank contributes so much.
    Open(Weights),
    /// The gradient of a parameter.
    Gradient { parameter: usize, gradient: Gradient },
    /// No more gradients come.
    Close,
    /// The caller has ended.
    End,
}

/// A gradient that has been read, or how to read it.
pub(crate) enum Gradient {
    Here(TensorData),
    There(Box<dyn FnOnce() -> Result<TensorData, TrainError> + Send>),
}

impl Reducer {
    /// Starts the thread for parameters that all ranks have alike.
    pub(crate) fn new(
        communicator: Arc<dyn Communicator>,
        parameters: Arc<[Parameter]>,
        options: ReducerOptions,
    ) -> Result<Self, TrainError> {
        let rank = communicator.rank();
        let (messages, inbox) = unbounded();
        let (outbox, replies) = unbounded();
        let buckets = PlannedBucket::plan(&parameters, options);
        let parameters_of = buckets.iter().map(|planned| planned.bucket.parameters.clone()).collect();
        let mut worker = Worker {
            communicator: communicator.clone(),
            parameters,
            buckets,
            reduction: options.reduction,
            inbox,
            has_ended: false,
        };
        let serve = move || {
            let served = panic::catch_unwind(AssertUnwindSafe(|| worker.serve(&outbox)));
            if let Err(payload) = served {
                let error = TrainError::ReducerPanicked { rank, reason: text_of(&*payload) };
                worker.communicator.abort(&error.to_string());
                // Nobody listens only if the caller has ended too.
                let _ = outbox.send(Err(error));
            }
        };
        let thread = thread::Builder::new().name(format!("bonfire reducer {rank}")).spawn(serve);
        let thread = Some(thread.map_err(TrainError::ReducerThread)?);
        Ok(Self { communicator, messages, replies, thread, buckets: parameters_of, is_open: false })
    }

    /// The parameters of each bucket, in order.
    pub(crate) fn buckets(&self) -> Arc<[Vec<usize>]> {
        self.buckets.clone()
    }

    pub(crate) const fn is_open(&self) -> bool {
        self.is_open
    }

    /// Begins a window; all ranks must.
    pub(crate) fn open(&mut self, weights: Weights) {
        self.is_open = true;
        self.tell(Message::Open(weights));
    }

    /// Hands over a gradient, once per parameter and window.
    pub(crate) fn give(&self, parameter: usize, gradient: TensorData) {
        self.tell(Message::Gradient { parameter, gradient: Gradient::Here(gradient) });
    }

    /// Where others can hand over gradients.
    pub(crate) fn messages(&self) -> Sender<Message> {
        self.messages.clone()
    }

    /// Ends the window; none if no rank has an item.
    pub(crate) fn close(&mut self) -> Result<Option<Reduced>, TrainError> {
        self.tell(Message::Close);
        self.is_open = false;
        // Waits no longer than the collectives of the window, each of which has a timeout.
        self.replies.recv().unwrap_or_else(|_| {
            let reason = "it has ended before".into();
            Err(TrainError::ReducerPanicked { rank: self.communicator.rank(), reason })
        })
    }

    fn tell(&self, message: Message) {
        // A thread that has ended has left its reason in `replies`.
        let _ = self.messages.send(message);
    }
}

impl Drop for Reducer {
    fn drop(&mut self) {
        self.tell(Message::End);
        let Some(thread) = self.thread.take() else { return };
        if self.is_open {
            // The thread may be waiting for ranks that wait for this one: wake them all, and do not wait for it.
            self.communicator.abort("a rank has ended in the middle of a window");
        } else {
            // It is between windows, so it ends at once, and with it its hold on the communicator.
            let _ = thread.join();
        }
    }
}

/// A bucket with where it lies on its way.
struct PlannedBucket {
    bucket: Bucket,
    dtype: DType,
    /// Where gradients of another dtype are narrowed or widened to; others travel in their own memory.
    flat: Option<(Flat, Vec<Range<usize>>)>,
}

impl PlannedBucket {
    fn plan(parameters: &[Parameter], options: ReducerOptions) -> Vec<Self> {
        let sizes: Vec<(DType, usize)> = parameters
            .iter()
            .map(|parameter| {
                let dtype = wire::host_dtype(parameter.dtype);
                (dtype, parameter.num_elements() * dtype.size())
            })
            .collect();
        let with_wire = |bucket: Bucket| {
            let dtype = options.dtype.of(bucket.dtype);
            let mut end = 0;
            let range = |&index: &usize| {
                let start = end;
                end += parameters[index].num_elements();
                start..end
            };
            let ranges: Vec<_> = bucket.parameters.iter().map(range).collect();
            let flat = (dtype != bucket.dtype).then(|| (Flat::new(dtype, end), ranges));
            Self { bucket, dtype, flat }
        };
        bucket::buckets(&sizes, options.caps).into_iter().map(with_wire).collect()
    }
}

/// What lives on the thread.
struct Worker {
    communicator: Arc<dyn Communicator>,
    parameters: Arc<[Parameter]>,
    buckets: Vec<PlannedBucket>,
    reduction: Reduction,
    inbox: Receiver<Message>,
    has_ended: bool,
}

impl Worker {
    /// Replies once to every window that is opened.
    fn serve(&mut self, outbox: &Sender<Result<Option<Reduced>, TrainError>>) {
        while !self.has_ended {
            let Ok(message) = self.inbox.recv() else { return };
            match message {
                Message::Open(weights) => {
                    let outcome = self.window(weights);
                    if let Err(error) = &outcome
                        && !matches!(error, TrainError::Collective(_))
                    {
                        // The others wait for a collective that will not come.
                        self.communicator.abort(&error.to_string());
                    }
                    // Nobody listens only if the caller has ended.
                    self.has_ended |= outbox.send(outcome).is_err();
                }
                // What is left of a window that failed, or had no items.
                Message::Gradient { .. } | Message::Close => {}
                Message::End => self.has_ended = true,
            }
        }
    }

    fn window(&mut self, weights: Weights) -> Result<Option<Reduced>, TrainError> {
        let world_size = self.communicator.world_size();
        let mut totals = vec![0.0; world_size];
        let own = [weights.total];
        self.communicator.all_gather(
            Buffer::from_slice(&own),
            &vec![1; world_size],
            BufferMut::from_slice(&mut totals),
        )?;
        let Some(scales) = window::scales(weights, &totals, self.reduction) else { return Ok(None) };

        let mut gradients: Vec<Option<TensorData>> = self.parameters.iter().map(|_| None).collect();
        let mut is_used = vec![0.0f32; self.parameters.len()];
        let mut next = 0;
        loop {
            match self.inbox.recv() {
                Ok(Message::Gradient { parameter, gradient }) => {
                    gradients[parameter] = Some(self.read(parameter, gradient)?);
                    is_used[parameter] = 1.0;
                }
                Ok(Message::Close) => break,
                // What follows an error of the caller's, which has aborted the group.
                Ok(Message::Open(_)) => return Err(TrainError::Internal { reason: LEFT_OPEN.into() }),
                Ok(Message::End) | Err(_) => {
                    self.has_ended = true;
                    return Err(TrainError::Internal { reason: LEFT_OPEN.into() });
                }
            }
            // The last bucket waits for the end: with it goes who has used what.
            while next + 1 < self.buckets.len()
                && self.buckets[next].bucket.parameters.iter().all(|&index| gradients[index].is_some())
            {
                self.reduce(next, &mut gradients, scales, None)?;
                next += 1;
            }
        }
        for index in next..self.buckets.len() {
            let is_last = index + 1 == self.buckets.len();
            self.reduce(index, &mut gradients, scales, is_last.then_some(&mut is_used[..]))?;
        }
        for (gradient, is_used) in gradients.iter_mut().zip(is_used) {
            if is_used == 0.0 {
                *gradient = None;
            }
        }
        Ok(Some(Reduced { gradients, weight: scales.weight }))
    }

    fn read(&self, index: usize, gradient: Gradient) -> Result<TensorData, TrainError> {
        let mut gradient = match gradient {
            Gradient::Here(gradient) => gradient,
            Gradient::There(read) => read()?,
        };
        gradient.dtype = wire::host_dtype(gradient.dtype);
        let parameter = &self.parameters[index];
        if gradient.num_elements() == parameter.num_elements() {
            Ok(gradient)
        } else {
            Err(TrainError::GradientShape {
                rank: self.communicator.rank(),
                parameter: parameter.name.clone(),
                given: gradient.num_elements(),
            })
        }
    }

    /// Replaces the gradients of one bucket by those of all ranks.
    fn reduce(
        &mut self,
        index: usize,
        gradients: &mut [Option<TensorData>],
        scales: Scales,
        is_used: Option<&mut [f32]>,
    ) -> Result<(), TrainError> {
        let PlannedBucket { bucket, dtype, flat } = &mut self.buckets[index];
        let shape = |index: usize| self.parameters[index].shape.clone();
        let is_used = is_used.map(BufferMut::from_slice);
        if let Some((flat, ranges)) = flat {
            for (&index, range) in bucket.parameters.iter().zip(ranges.iter()) {
                flat.write(range.clone(), gradients[index].as_ref(), scales.before);
            }
            let mut buffers: Vec<_> = [flat.buffer()].into_iter().chain(is_used).collect();
            self.communicator.all_reduce_many(&mut buffers, ReduceOp::Mean)?;
            for (&index, range) in bucket.parameters.iter().zip(ranges.iter()) {
                gradients[index] = Some(flat.read(range.clone(), shape(index), bucket.dtype, scales.after));
            }
            return Ok(());
        }
        let mut moved = Vec::with_capacity(bucket.parameters.len());
        for &index in &bucket.parameters {
            moved.push(match gradients[index].take() {
                Some(mut gradient) => {
                    wire::scale(&mut gradient, scales.before);
                    gradient.convert_dtype(*dtype)
                }
                None => TensorData::full_dtype(shape(index), 0.0, *dtype),
            });
        }
        let buffers: Result<Vec<_>, _> = moved.iter_mut().map(wire::buffer).collect();
        let mut buffers = buffers?;
        buffers.extend(is_used);
        self.communicator.all_reduce_many(&mut buffers, ReduceOp::Mean)?;
        for (&index, mut gradient) in bucket.parameters.iter().zip(moved) {
            wire::scale(&mut gradient, scales.after);
            gradients[index] = Some(gradient);
        }
        Ok(())
    }
}

fn text_of(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "with no message".into())
}
