//! Batch statistics, and gradients during backward, where each rank is a replica of several members.

use std::sync::{Arc, Mutex};

use bonfire::{
    Replica, ReplicaDevice, ReplicaOptions, Spread,
    collectives::Communicator,
    train::{GradientSink, HookBackend, Hooks, SyncBatchNorm, SyncGroup},
};
use burn::{
    backend::Autodiff,
    module::{Module, ModuleVisitor, Param, ParamId},
    nn::{
        BatchNormConfig, Linear, LinearConfig,
        conv::{Conv2d, Conv2dConfig},
    },
    optim::GradientsParams,
    record::{BinBytesRecorder, FullPrecisionSettings, Recorder},
    tensor::{
        Tensor, TensorData, TensorPrimitive,
        backend::{AutodiffBackend, Backend},
        ops::FloatTensor,
    },
};
use burn_flex::{Flex, FlexDevice};

use crate::{models::filled, step::each_rank};

type One = Autodiff<Flex>;
type Many = Autodiff<Replica<Flex>>;

const NUM_ITEMS: usize = 9;

#[derive(Module, Debug)]
struct Net<B: Backend> {
    conv: Conv2d<B>,
    norm: SyncBatchNorm<B>,
    output: Linear<B>,
}

impl<B: HookBackend> Net<B> {
    fn new(communicator: Arc<dyn Communicator>, device: &B::Device) -> Self {
        let group = SyncGroup::new::<B>(communicator);
        Self {
            conv: Conv2dConfig::new([2, 3], [3, 3]).init(device),
            norm: SyncBatchNorm::new(BatchNormConfig::new(3).init(device), &group),
            output: LinearConfig::new(3 * 4 * 4, 2).init(device),
        }
    }

    /// Of a mean over these items of the global batch.
    fn gradients(&self, items: core::ops::Range<usize>, device: &B::Device) -> GradientsParams {
        let (num, size) = (items.len(), 2 * 6 * 6);
        let values: Vec<f32> = (items.start * size..items.end * size).map(|index| (index as f32).sin()).collect();
        let images = Tensor::<B, 4>::from_data(TensorData::new(values, [num, 2, 6, 6]), device);
        let hidden = self.norm.forward(self.conv.forward(images)).tanh();
        let output = self.output.forward(hidden.flatten::<2>(1, 3));
        GradientsParams::from_grads(output.powi_scalar(2).mean().backward(), self)
    }
}

/// Gradients in the model's order, or the values where there are none: those of running statistics.
struct Read<'a>(&'a GradientsParams, Vec<f32>);

impl<B: AutodiffBackend> ModuleVisitor<B> for Read<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let gradient = self.0.get::<B::InnerBackend, D>(param.id);
        let data = gradient.map_or_else(|| param.val().into_data(), Tensor::into_data);
        self.1.extend(data.iter::<f32>());
    }
}

fn read<B: AutodiffBackend>(model: &Net<B>, gradients: &GradientsParams) -> Vec<f32>
where
    Net<B>: Module<B>,
{
    // What waits for the next forward pass is taken over by asking.
    let _record = model.clone().into_record();
    let mut read = Read(gradients, Vec::new());
    model.visit(&mut read);
    read.1
}

fn replica() -> ReplicaDevice<Flex> {
    let options = ReplicaOptions { spread: Spread::OnHeavyOp { min_work: 1 }, ..ReplicaOptions::default() };
    ReplicaDevice::with_options(vec![FlexDevice; 2], options).unwrap()
}

#[test]
fn batch_statistics_are_those_of_one_device_where_ranks_are_replicas() {
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::new();
    let alone = each_rank(1, |communicator| {
        let model = filled(Net::<One>::new(communicator, &FlexDevice));
        let record: Vec<u8> = Recorder::<One>::record(&recorder, model.clone().into_record(), ()).unwrap();
        let gradients = model.gradients(0..NUM_ITEMS, &FlexDevice);
        (record, read(&model, &gradients))
    });
    let (record, expected) = &alone[0];
    let shares = [0..5, 5..NUM_ITEMS];
    let parts = each_rank(2, |communicator| {
        let (items, device) = (shares[communicator.rank()].clone(), replica());
        let model = Net::<Many>::new(communicator, &device);
        let model = model.load_record(Recorder::<Many>::load(&recorder, record.clone(), &device).unwrap());
        let gradients = model.gradients(items, &device);
        read(&model, &gradients)
    });
    for (index, expected) in expected.iter().enumerate() {
        let found = (parts[0][index] * 5.0 + parts[1][index] * 4.0) / 9.0;
        assert!((found - expected).abs() < 1e-5, "value {index}: {found} is not {expected}");
    }
}

#[test]
fn hooks_hand_over_the_gradients_of_a_replica() {
    type Handed = Vec<(ParamId, FloatTensor<Replica<Flex>>)>;

    #[derive(Default)]
    struct Collected(Mutex<Handed>);

    impl GradientSink<Replica<Flex>> for Collected {
        fn ready(&self, id: ParamId, gradient: FloatTensor<Replica<Flex>>) {
            self.0.lock().unwrap().push((id, gradient));
        }
    }

    each_rank(1, |communicator| {
        let device = replica();
        let model = Net::<Many>::new(communicator, &device);
        let sink = Arc::new(Collected::default());
        let hooked = Hooks::<Many>::new().hook(&model, sink.clone());
        let gradients = hooked.model.gradients(0..NUM_ITEMS, &device);
        let report = hooked.finish(&gradients);
        assert!(report.holds() && report.fired.len() == 6, "{report:?}");
        // Read by another thread, as the one that reduces does.
        let handed = core::mem::take(&mut *sink.0.lock().unwrap());
        let values = std::thread::spawn(move || {
            let read = |(id, gradient)| {
                let tensor = Tensor::<Replica<Flex>, 1>::from_primitive(TensorPrimitive::Float(gradient));
                (id, tensor.into_data())
            };
            handed.into_iter().map(read).collect::<Vec<(ParamId, TensorData)>>()
        });
        for (id, values) in values.join().unwrap() {
            let expected = gradients.get::<Replica<Flex>, 1>(id).unwrap().into_data();
            assert_eq!(values.as_bytes(), expected.as_bytes());
        }
    });
}
