//! What all ports of a source together may want, and telling the kernel so.
//!
//! See [`vnplug_path::source::early`] for who does what when.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::{Hub, Owed};
use vnplug_filter::Program;
use vnplug_filter::ebpf::Wanted;
use vnplug_path::engine::loader::{Loader, Narrowing, QueueSeat};
use vnplug_path::engine::{Command, Worker};
use vnplug_path::source::early::{Seat, Standing};

/// The most filters that are put into the kernel together.
pub const MAX_EARLY_FILTERS: usize = 64;
/// The most classic instructions of them, and the most loads at variable offsets (an IPv4 port takes
/// two). They run one after the other, for each frame that nobody wants. 64 filters by host cost it
/// 50 ns, 32 variable loads 200 ns; bringing it to the daemon costs about 150 ns for 60 bytes and
/// 450 ns for 1514. The verifier takes up to 0.1 s. (`cost_of_a_union_by_the_number_of_its_filters`)
pub const MAX_EARLY_INSTRUCTIONS: usize = 768;
/// See [`MAX_EARLY_INSTRUCTIONS`].
pub const MAX_EARLY_LOADS: usize = 32;

/// The early drop of one source.
#[derive(Debug)]
pub struct Early {
    /// None: the kernel drops nothing early here.
    places: Vec<QueueSeat>,
    standing: Arc<Standing>,
    generation: u64,
    /// What ports may want, each with how many do.
    wants: HashMap<Key, (Wanted, usize)>,
    /// What the kernel lets through at least, as far as it was asked to let through less than all.
    asked: Option<BTreeSet<Key>>,
}

/// The programs in wire form.
type Key = Vec<u8>;

impl Early {
    /// For a source whose queues have these seats, or have none for this reason (`None`: it is no
    /// matter of the kernel's).
    pub fn new(seats: Result<Vec<Seat>, Option<String>>, workers: &[Worker]) -> Self {
        let standing = Arc::new(Standing::default());
        let places = match seats {
            Ok(seats) => {
                // One filter for all queues is one thread's business.
                let count = match seats.first() {
                    Some(first) if first.is_shared() => 1,
                    _ => seats.len(),
                };
                let each = seats.into_iter().zip(workers).take(count);
                each.map(|(seat, worker)| QueueSeat {
                    seat,
                    line: worker.line(),
                })
                .collect()
            }
            Err(why) => {
                standing.begin(0, why.unwrap_or_default());
                Vec::new()
            }
        };
        Self {
            places,
            standing,
            generation: 0,
            wants: HashMap::new(),
            asked: None,
        }
    }

    /// How it stands, for people; empty where it is no matter of the kernel's.
    pub(super) fn standing(&self) -> String {
        self.standing.text()
    }

    /// A port is going to judge by this: when the threads have answered, no frame that it wants is
    /// dropped any more.
    fn add(&mut self, wanted: &Wanted) -> Vec<Owed<()>> {
        if self.places.is_empty() {
            return Vec::new();
        }
        let key = wanted.to_bytes();
        let narrow = self.asked.as_ref();
        let widening = match narrow.is_some_and(|asked| !asked.contains(&key)) {
            true => self.widen(),
            false => Vec::new(),
        };
        self.wants
            .entry(key)
            .or_insert_with(|| (wanted.clone(), 0))
            .1 += 1;
        widening
    }

    /// No port judges by this any more, or one less.
    fn remove(&mut self, wanted: &Wanted) {
        let key = wanted.to_bytes();
        if let Some((_, ports)) = self.wants.get_mut(&key) {
            *ports -= 1;
            if *ports == 0 {
                self.wants.remove(&key);
            }
        }
    }

    /// Has every queue let everything through.
    fn widen(&mut self) -> Vec<Owed<()>> {
        self.generation += 1;
        self.asked = None;
        self.standing
            .begin(self.generation, "off: filters are changing");
        let widen = |place: &QueueSeat| {
            let standing = Arc::clone(&self.standing);
            Owed::ask(place.line.clone(), |reply| {
                Command::Widen(self.generation, standing, reply)
            })
        };
        self.places.iter().map(widen).collect()
    }

    /// Has the kernel let through no more than the ports may want, soon.
    fn settle(&mut self, source: usize, loader: &Loader) {
        if self.places.is_empty() {
            return;
        }
        if let Some(why) = self.obstacle() {
            // Whatever led here was wider than what was asked for, so everything is let through.
            self.standing.say(self.generation, &format!("off: {why}"));
            return;
        }
        let keys: BTreeSet<Key> = self.wants.keys().cloned().collect();
        if self.asked.as_ref() == Some(&keys) {
            return;
        }
        self.asked = Some(keys);
        let wants = self.wants.values().map(|(wanted, _)| wanted.clone());
        let narrowing = Narrowing {
            generation: self.generation,
            wants: wants.collect(),
            places: self.places.clone(),
            standing: Arc::clone(&self.standing),
        };
        loader.ask(source, narrowing);
    }

    /// Why the filters of the ports are not for the kernel.
    fn obstacle(&self) -> Option<String> {
        let filters = self.wants.len();
        if self.wants.contains_key(&Wanted::default().to_bytes()) {
            return Some("a port wants everything".into());
        }
        if filters > MAX_EARLY_FILTERS {
            return Some(format!(
                "{filters} filters; the most are {MAX_EARLY_FILTERS}"
            ));
        }
        let each = self.wants.values().map(|(wanted, _)| wanted.instructions());
        let instructions: usize = each.sum();
        if instructions > MAX_EARLY_INSTRUCTIONS {
            return Some(format!(
                "{instructions} instructions of filters; the most are {MAX_EARLY_INSTRUCTIONS}"
            ));
        }
        let each = self
            .wants
            .values()
            .map(|(wanted, _)| wanted.variable_loads());
        let loads: usize = each.sum();
        (loads > MAX_EARLY_LOADS)
            .then(|| format!("{loads} variable loads of filters; the most are {MAX_EARLY_LOADS}"))
    }
}

impl Hub {
    /// From now on, what nobody wants is dropped by the kernel where it can be.
    pub(crate) fn drop_early(&mut self, loader: Loader) {
        self.loader = Some(loader);
        for source in 0..self.sources.len() {
            self.settle_early(source);
        }
    }

    /// A port of a source is going to judge by these programs; the kernel lets through what they
    /// want when the threads have answered.
    pub(super) fn will_want(
        &mut self,
        source: usize,
        guard: Option<&Arc<Program>>,
        filter: Option<&Arc<Program>>,
    ) -> (Wanted, Vec<Owed<()>>) {
        let wanted = Wanted::new(guard, filter);
        let widening = self.sources[source].early.add(&wanted);
        (wanted, widening)
    }

    /// A port of a source does not judge so any more.
    pub(super) fn wants_no_more(&mut self, source: usize, wanted: &Wanted) {
        self.sources[source].early.remove(wanted);
        self.settle_early(source);
    }

    /// After ports of a source have changed what they want.
    pub(super) fn settle_early(&mut self, source: usize) {
        if let Some(loader) = &self.loader {
            self.sources[source].early.settle(source, loader);
        }
    }
}
