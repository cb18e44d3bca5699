// Grafana's published types, as dashboards in JSON have to fit them: enumerations by their values,
// and queries with whatever their datasource adds. tests/stack/test_grafana_schema.py appends the
// dashboards as literals and lets the TypeScript compiler look for anything that does not belong.
import type { Dashboard, DataQuery } from "@grafana/schema";

type Plain<T> = T extends string
  ? `${T}`
  : T extends number | boolean | null | undefined
    ? T
    : T extends DataQuery
      ? { [K in keyof T]: Plain<T[K]> } & Record<string, unknown>
      : T extends Array<infer Item>
        ? Array<Plain<Item>>
        : T extends object
          ? { [K in keyof T]: Plain<T[K]> }
          : T;

type Board = Plain<Omit<Dashboard, "id">> & { id: null };
