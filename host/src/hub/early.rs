//! What all ports of a source together may want, and telling the kernel so.
//!
//! See [`vnplug_path::source::early`] for who does what when.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::Hub;
use vnplug_filter::Program;
use vnplug_filter::ebpf::{MAX_FILTERS, Wanted};
use vnplug_path::engine::Worker;
use vnplug_path::engine::loader::{Loader, Narrowing, QueueSeat};
use vnplug_path::source::early::{Seat, Standing};

/// The most filters that are put into the kernel together.
pub const MAX_EARLY_FILTERS: usize = MAX_FILTERS;
/// The most classic instructions of them, and the most loads at variable offsets (an IPv4 port takes
/// two). They run one after the other, for each frame that nobody wants. 64 filters by host cost it
/// 145 ns, 8 variable loads 200 ns and 32 of them 590 ns; bringing it to the daemon costs about 150 ns for 60
/// bytes and 450 ns for 1514. So with more than a few ports of IPv4 short frames cost the kernel more than they
/// would cost the daemon, whose thread has them not. The verifier takes up to 0.1 s.
/// (`cost_of_a_union_by_the_number_of_its_filters`)
pub const MAX_EARLY_INSTRUCTIONS: usize = 768;
/// See [`MAX_EARLY_INSTRUCTIONS`].
pub const MAX_EARLY_LOADS: usize = 32;

/// The most filters that are out and stay in the kernel: this number in any case, or twice as many as are on.
const FEW_OUT: usize = 4;

/// The early drop of one source.
#[derive(Debug)]
pub struct Early {
    /// None: the kernel drops nothing early here.
    places: Vec<QueueSeat>,
    standing: Arc<Standing>,
    generation: u64,
    /// What ports may want, each with how many do.
    wants: HashMap<Key, (Wanted, usize)>,
    /// The filters of this generation, each with its number: none, if everything passes.
    asked: Option<BTreeMap<Key, usize>>,
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

    /// A port is going to judge by this: from now on no frame that it wants is dropped.
    fn add(&mut self, wanted: &Wanted) {
        if self.places.is_empty() {
            return;
        }
        let key = wanted.to_bytes();
        let narrow = self.asked.as_ref();
        if narrow.is_some_and(|asked| !asked.contains_key(&key)) {
            self.widen();
        }
        let entry = self.wants.entry(key);
        entry.or_insert_with(|| (wanted.clone(), 0)).1 += 1;
        self.light();
    }

    /// No port judges by this any more, or one less.
    fn remove(&mut self, wanted: &Wanted) {
        let key = wanted.to_bytes();
        if let Some((_, ports)) = self.wants.get_mut(&key) {
            *ports -= 1;
            if *ports == 0 {
                self.wants.remove(&key);
                self.light();
            }
        }
    }

    /// Has every queue let everything through.
    fn widen(&mut self) {
        self.generation += 1;
        self.asked = None;
        self.standing
            .begin(self.generation, "off: filters are changing");
        self.set(0);
    }

    /// Puts on those filters that are wanted, and no others.
    fn light(&self) {
        let Some(asked) = &self.asked else {
            return;
        };
        let lit = asked
            .iter()
            .filter(|(key, _)| self.wants.contains_key(*key));
        self.set(lit.fold(0, |on, (_, number)| on | 1 << number));
        self.standing
            .wants(told(self.wants.values().map(|it| &it.0)));
    }

    /// Says in the books of all queues which filters of this generation are on.
    fn set(&self, on: u64) {
        for place in &self.places {
            place.seat.set(self.generation as u32, on);
        }
    }

    /// Has the kernel let through no more than the ports may want, soon.
    fn settle(&mut self, source: usize, loader: &Loader) {
        if self.places.is_empty() {
            return;
        }
        if let Some(why) = self.obstacle() {
            // Whatever led here was wider than what was asked for, so everything is let through.
            let why = format!("off: {why}");
            self.standing.say(self.generation, Err(&why));
            return;
        }
        if let Some(asked) = &self.asked {
            // What else is wanted would have ended the generation. Each filter that is out costs the kernel a look, and
            // a union that it did not take may be shorter now.
            let (all, lit) = (asked.len(), self.wants.len());
            if all <= 2 * lit + FEW_OUT && !(all > lit && self.standing.has_failed()) {
                return;
            }
            self.widen();
        }
        let filters: BTreeMap<&Key, &Wanted> =
            self.wants.iter().map(|(key, it)| (key, &it.0)).collect();
        let wants = filters.values().map(|wanted| (*wanted).clone()).collect();
        let numbered = filters.into_keys().cloned().zip(0..);
        self.asked = Some(numbered.collect());
        self.light();
        let narrowing = Narrowing {
            generation: self.generation,
            wants,
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

/// What is wanted, for people.
fn told<'a>(wants: impl ExactSizeIterator<Item = &'a Wanted>) -> String {
    let filters = wants.len();
    let instructions: usize = wants.map(Wanted::instructions).sum();
    match filters {
        0 => "no port wants anything".to_owned(),
        1 => format!("1 filter, {instructions} instructions"),
        _ => format!("{filters} filters, {instructions} instructions"),
    }
}

impl Hub {
    /// From now on, what nobody wants is dropped by the kernel where it can be.
    pub(crate) fn drop_early(&mut self, loader: Loader) {
        self.loader = Some(loader);
        (0..self.sources.len()).for_each(|source| self.settle_early(source));
    }

    /// A port of a source is going to judge by these programs; the kernel lets through what they
    /// want.
    pub(super) fn will_want(
        &mut self,
        source: usize,
        guard: Option<&Arc<Program>>,
        filter: Option<&Arc<Program>>,
    ) -> Wanted {
        let wanted = Wanted::new(guard, filter);
        self.sources[source].early.add(&wanted);
        wanted
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
