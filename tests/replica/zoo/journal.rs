//! What a training program writes down while it runs, and the loop that most of them share.

use burn::{
    module::{AutodiffModule, Module, ModuleVisitor, Param},
    optim::{GradientsParams, Optimizer},
    record::{BinBytesRecorder, FullPrecisionSettings, Record, Recorder},
    tensor::{
        ElementConversion, Tensor, TensorData,
        backend::{AutodiffBackend, Backend},
    },
};
use serde_json::Value;

use super::super::runs::gradients;

pub const NUM_STEPS: u64 = 20;

/// A training program: model, data, loss and optimizers, as a user has them.
pub trait Program {
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal);
}

/// What a run leaves behind. Two runs on the same members leave the same, bit for bit.
#[derive(Debug, Default, PartialEq)]
pub struct Trace {
    /// All losses of all steps.
    pub losses: Vec<f64>,
    /// Of one more loss, after the last step; one list per parameter.
    pub gradients: Vec<Vec<f64>>,
    /// After the last step, one list per parameter and running statistic.
    pub parameters: Vec<Vec<f64>>,
    /// What the model infers in the end.
    pub outputs: Vec<f64>,
    /// What is the same on every device to the last bit: draws, and indices that are chosen.
    pub exact: Vec<TensorData>,
}

/// What was saved: the parameters' ids in it are random, so no two runs save the same.
#[derive(Clone, Debug, Default)]
pub struct Saved {
    models: Vec<Vec<u8>>,
    optimizers: Vec<Vec<u8>>,
}

/// Watches a program.
pub struct Journal<'a> {
    pub trace: Trace,
    pub saved: Saved,
    /// Called between two steps.
    between_steps: &'a mut dyn FnMut(),
    /// What another run saved, to be loaded here.
    others: Saved,
    /// What models infer that were loaded.
    pub loaded_outputs: Vec<f64>,
}

impl<'a> Journal<'a> {
    pub fn new(others: Saved, between_steps: &'a mut dyn FnMut()) -> Self {
        Self { trace: Trace::default(), saved: Saved::default(), between_steps, others, loaded_outputs: vec![] }
    }

    /// The end of a step: its losses are read.
    pub fn step<B: Backend, const N: usize>(&mut self, losses: [Tensor<B, 1>; N]) {
        for loss in losses {
            self.trace.losses.push(loss.into_scalar().elem());
        }
        (self.between_steps)();
    }

    pub fn exact(&mut self, data: TensorData) {
        self.trace.exact.push(data);
    }

    /// The end of the training of one model: its parameters, what it infers, and its record. A record that another run
    /// saved is loaded, infers, and is saved again: the same bytes.
    pub fn finish<B: AutodiffBackend, M: AutodiffModule<B>, const D: usize>(
        &mut self,
        model: &M,
        infer: impl Fn(&M::InnerModule) -> Tensor<B::InnerBackend, D>,
    ) {
        let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
        let save = |model: &M::InnerModule| {
            Recorder::<B::InnerBackend>::record(&recorder, model.clone().into_record(), ()).unwrap()
        };
        let model = model.valid();
        self.trace.parameters.extend(values(&model));
        self.trace.outputs.extend(infer(&model).into_data().iter::<f64>());
        let bytes = save(&model);
        if let Some(theirs) = self.others.models.get(self.saved.models.len()) {
            let device = model.devices().remove(0);
            let loaded = model.load_record(recorder.load(theirs.clone(), &device).unwrap());
            self.loaded_outputs.extend(infer(&loaded).into_data().iter::<f64>());
            assert_eq!(&save(&loaded), theirs, "saved again, a record has other bytes");
        }
        self.saved.models.push(bytes);
    }

    /// The record of an optimizer, as [`finish`](Self::finish) for a model; its map has no order.
    pub fn finish_optimizer<B: AutodiffBackend, M: AutodiffModule<B>, O: Optimizer<M, B>>(
        &mut self,
        optimizer: &O,
        device: &B::Device,
    ) {
        let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
        if let Some(theirs) = self.others.optimizers.get(self.saved.optimizers.len()) {
            let load = || recorder.load(theirs.clone(), device).unwrap();
            let loaded = optimizer.clone().load_record(load());
            assert_eq!(by_key::<B, _>(loaded.to_record()), by_key::<B, O::Record>(load()));
            let bytes = Recorder::<B>::record(&recorder, loaded.to_record(), ()).unwrap();
            assert_eq!(bytes.len(), theirs.len());
        }
        self.saved.optimizers.push(recorder.record(optimizer.to_record(), ()).unwrap());
    }
}

fn by_key<B: Backend, R: Record<B>>(record: R) -> Value {
    serde_json::to_value(record.into_item::<FullPrecisionSettings>()).unwrap()
}

/// Every parameter's values and every running statistic's, one list each.
pub fn values<B: Backend, M: Module<B>>(model: &M) -> Vec<Vec<f64>> {
    struct Visitor(Vec<Vec<f64>>);
    impl<B: Backend> ModuleVisitor<B> for Visitor {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.push(param.val().into_data().iter::<f64>().collect());
        }
    }
    let mut visitor = Visitor(vec![]);
    model.visit(&mut visitor);
    visitor.0
}

/// The loop of most programs: one model, one optimizer, the loss read after each step.
pub fn fit<B: AutodiffBackend, M: AutodiffModule<B>, O: Optimizer<M, B>>(
    journal: &mut Journal,
    mut model: M,
    mut optimizer: O,
    learning_rate: f64,
    loss: impl Fn(&M, u64) -> Tensor<B, 1>,
) -> M {
    for step in 0..NUM_STEPS {
        let loss = loss(&model, step);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(learning_rate, model, grads);
        journal.step([loss]);
    }
    let grads = GradientsParams::from_grads(loss(&model, NUM_STEPS).backward(), &model);
    journal.trace.gradients = gradients(&model, &grads);
    let device = model.devices().remove(0);
    journal.finish_optimizer::<B, M, O>(&optimizer, &device);
    model
}
