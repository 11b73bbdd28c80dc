//! Who runs against whom, each with one thread for its tensors.

use core::num::NonZeroUsize;
use std::{
    hint::black_box,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use bonfire::{
    collectives::ThreadCommunicator,
    train::{SyncOptions, TrainingStep},
};
use burn::{
    backend::Autodiff,
    optim::{AdamConfig, GradientsParams, Optimizer},
};
use burn_flex::{Flex, FlexDevice};

use crate::subjects::Subject;

type B = Autodiff<Flex>;

/// Runs one measurement and gives its seconds.
pub type Contender = Box<dyn FnMut() -> f64>;

/// Steps as one writes them without ranks.
pub fn alone<S: Subject>(batch_size: usize, num_steps: usize) -> Contender {
    on_a_thread(num_steps, move || {
        let (batch, mut optimizer) = (S::batch(batch_size), AdamConfig::new().init::<B, S::Model<B>>());
        let mut model = Some(S::init::<B>(&FlexDevice));
        move || {
            let current = model.take().expect("put back after each step");
            let loss = S::loss::<B>(&current, &batch, &FlexDevice);
            let gradients = GradientsParams::from_grads(loss.backward(), &current);
            model = Some(optimizer.step(1e-3, current, gradients));
            black_box(loss.into_data());
        }
    })
}

/// The same steps as the one rank of a group.
pub fn one_rank<S: Subject>(batch_size: usize, num_steps: usize) -> Contender {
    on_a_thread(num_steps, move || {
        let (batch, mut optimizer) = (S::batch(batch_size), AdamConfig::new().init::<B, S::Model<B>>());
        let model = S::init::<B>(&FlexDevice);
        let group = ThreadCommunicator::group(NonZeroUsize::MIN, Duration::from_secs(10));
        let communicator = Arc::new(group.into_iter().next().expect("rank 0"));
        let mut step = TrainingStep::<B>::new(communicator, &model, SyncOptions::default()).expect("one rank");
        let mut model = Some(step.synchronise(model).expect("one rank"));
        move || {
            let current = model.take().expect("put back after each step");
            let loss = S::loss::<B>(&current, &batch, &FlexDevice);
            let gradients = GradientsParams::from_grads(loss.backward(), &current);
            step.micro_step(gradients, batch_size as f64).expect("gradients");
            let window = step.finish().expect("one rank").expect("items");
            let stepped = optimizer.step(1e-3, current, window.gradients);
            model = Some(step.settle(stepped).expect("one rank"));
            black_box(loss.into_data());
        }
    })
}

/// A thread that starts with a rayon pool of itself alone, and makes what it runs.
fn on_a_thread<F: FnMut() + 'static>(num_steps: usize, make: impl Fn() -> F + Send + 'static) -> Contender {
    let (start, started): (Sender<()>, Receiver<()>) = channel();
    let (finish, finished) = channel();
    thread::spawn(move || {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build();
        let _pool = pool.expect("a pool");
        let mut step = make();
        for () in started {
            (0..num_steps).for_each(|_| step());
            finish.send(()).expect("somebody waits");
        }
    });
    Box::new(move || {
        let begin = Instant::now();
        start.send(()).expect("a worker");
        finished.recv().expect("a worker");
        begin.elapsed().as_secs_f64() / num_steps as f64
    })
}
