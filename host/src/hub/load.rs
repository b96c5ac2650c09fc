//! What one owner's filters may cost a frame of one source at most.
//!
//! Filters that are looked up cost little each, unless a frame can be sent on which many of them
//! must be run. So they are not simply added up: of each field only the value counts that leads to
//! the most instructions, for a frame has one value there. That bounds the work whatever is on the
//! wire, also for an owner who gives ten thousand filters one address.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use vnplug_filter::{Analysis, Field, Key, Program};

/// Looking a frame up in a field, in instructions of a filter.
const LOOK: usize = 8;
/// Keys of all filters of one owner, who is no operator, on one source, times its queues. Each
/// takes about 150 bytes.
pub(super) const MAX_KEYS_EACH: usize = 262_144;

/// Fields of all filters of one owner, who is no operator, on one source.
pub(super) const MAX_FIELDS_EACH: usize = 256;

/// Of one owner, on one source.
#[derive(Debug, Default)]
pub(super) struct Load {
    /// Instructions of all filters.
    all: usize,
    /// Instructions of filters that are run on every frame, or on a range of values, of which all may
    /// have some in common.
    always: usize,
    /// The sum of what each field costs at most, without the look.
    heaviest: usize,
    /// Times queues.
    fields: HashMap<Field, FieldLoad>,
    /// Times queues.
    pub(super) keys: usize,
}

#[derive(Debug, Default)]
struct FieldLoad {
    /// Keys in it of all filters, also of those that count as run on every frame.
    keys: usize,
    /// Instructions after each value, of the others.
    values: HashMap<u64, usize>,
    /// How many values have this many instructions after them.
    weights: BTreeMap<usize, usize>,
}

/// What one owner has.
#[derive(Debug, Default)]
pub(super) struct Owned {
    pub(super) ports: BTreeSet<u32>,
    /// By source.
    pub(super) loads: HashMap<usize, Load>,
}

impl Load {
    /// Instructions per frame at most; a filter counts once per queue.
    pub(super) fn work(&self, queues: usize) -> usize {
        let run = self.all.min(self.always + self.heaviest);
        run + self.fields.len() * LOOK * queues
    }

    /// Different fields.
    pub(super) fn fields(&self) -> usize {
        self.fields.len()
    }

    /// Adds a filter that runs in this many queues.
    pub(super) fn add(&mut self, program: &Program, queues: usize) {
        let work = program.instructions().len() * queues;
        self.all += work;
        match program.analysis() {
            Analysis::Always => self.always += work,
            Analysis::If(keys) => {
                self.keys += keys.len() * queues;
                let ranges = keys.iter().any(Key::is_range);
                if ranges {
                    self.always += work;
                }
                for key in keys {
                    let field = self.fields.entry(key.field.clone()).or_default();
                    field.keys += 1;
                    if ranges {
                        continue;
                    }
                    let before = field.heaviest();
                    let weight = field.values.entry(key.low).or_default();
                    let old = std::mem::replace(weight, *weight + work);
                    field.weigh(old, old + work);
                    self.heaviest = self.heaviest + field.heaviest() - before;
                }
            }
        }
    }

    /// Undoes an [`add`](Self::add).
    pub(super) fn remove(&mut self, program: &Program, queues: usize) {
        let work = program.instructions().len() * queues;
        self.all -= work;
        match program.analysis() {
            Analysis::Always => self.always -= work,
            Analysis::If(keys) => {
                self.keys -= keys.len() * queues;
                let ranges = keys.iter().any(Key::is_range);
                if ranges {
                    self.always -= work;
                }
                for key in keys {
                    let Some(field) = self.fields.get_mut(&key.field) else {
                        continue;
                    };
                    field.keys -= 1;
                    let before = field.heaviest();
                    if !ranges && let Some(weight) = field.values.get_mut(&key.low) {
                        let old = std::mem::replace(weight, *weight - work);
                        let new = *weight;
                        if new == 0 {
                            field.values.remove(&key.low);
                        }
                        field.weigh(old, new);
                    }
                    self.heaviest = self.heaviest + field.heaviest() - before;
                    if field.keys == 0 {
                        self.fields.remove(&key.field);
                    }
                }
            }
        }
    }
}

impl FieldLoad {
    fn heaviest(&self) -> usize {
        self.weights.last_key_value().map_or(0, |(work, _)| *work)
    }

    /// A value's work became another; 0 is none.
    fn weigh(&mut self, old: usize, new: usize) {
        if let Some(count) = self.weights.get_mut(&old) {
            *count -= 1;
            if *count == 0 {
                self.weights.remove(&old);
            }
        }
        if new > 0 {
            *self.weights.entry(new).or_default() += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnplug_filter::Trust;
    use vnplug_filter::libpcap::Library;

    fn program(library: &Library, text: &str) -> Program {
        let text = std::ffi::CString::new(text).unwrap();
        let list = library.compile(&text, 262_144, 1).unwrap();
        Program::from_instructions(&list, Trust::Guest).unwrap()
    }

    #[test]
    fn many_hosts_cost_a_look_and_many_filters_of_one_host_cost_them_all() {
        let library = Library::load().unwrap();
        let mut load = Load::default();
        let hosts = (0..1_000).map(|n| format!("host 10.0.{}.{}", n / 256, n % 256));
        let hosts: Vec<Program> = hosts.map(|text| program(&library, &text)).collect();
        hosts.iter().for_each(|it| load.add(it, 1));
        assert!(load.work(1) < 200, "{}", load.work(1));
        let one = (0..1_000).map(|n| format!("host 10.9.9.9 and greater {}", n + 100));
        let one: Vec<Program> = one.map(|text| program(&library, &text)).collect();
        one.iter().for_each(|it| load.add(it, 1));
        let instructions: usize = one.iter().map(|it| it.instructions().len()).sum();
        assert!(load.work(1) > instructions, "{}", load.work(1));
        one.iter().for_each(|it| load.remove(it, 1));
        assert!(load.work(1) < 200, "{}", load.work(1));
        // All frames may be in ranges: those filters are added up, each of them once.
        let (before, fields) = (load.work(2), load.fields());
        let ranges = ["portrange 1-1000", "src portrange 1-9 or host 10.0.0.1"];
        let ranges = ranges.map(|text| program(&library, text));
        ranges.iter().for_each(|it| load.add(it, 2));
        let instructions: usize = ranges.iter().map(|it| it.instructions().len()).sum();
        let looks = (load.fields() - fields) * LOOK;
        assert_eq!(load.work(2), before + 2 * (instructions + looks));
        ranges.iter().for_each(|it| load.remove(it, 2));
        assert_eq!((load.work(2), load.fields()), (before, fields));
        hosts.iter().for_each(|it| load.remove(it, 1));
        assert_eq!((load.work(1), load.keys, load.fields.len()), (0, 0, 0));
    }

    #[test]
    fn one_filter_never_counts_more_than_its_length_and_its_looks() {
        let library = Library::load().unwrap();
        for text in ["tcp port 80", "host 10.0.0.1", "vlan 5 and host 10.0.0.1"] {
            let program = program(&library, text);
            let mut load = Load::default();
            load.add(&program, 2);
            let looks = load.fields.len() * LOOK * 2;
            assert_eq!(load.work(2), program.instructions().len() * 2 + looks);
        }
    }
}
