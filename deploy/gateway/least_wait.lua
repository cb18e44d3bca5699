-- If every replica that Envoy tries answers 429, the client gets the shortest Retry-After.
--
-- The filter runs once per replica that gets the request. Envoy forwards the last answer, so each refusal
-- gets the shortest Retry-After so far. Waits of earlier tries are kept by request id, in two generations
-- of at most MAX_KEPT requests, so that memory is bounded.
local MAX_KEPT = 1000
local young, old, count = {}, {}, 0

local function remember(id, wait)
  if count == MAX_KEPT then young, old, count = {}, young, 0 end
  if young[id] == nil then count = count + 1 end
  young[id] = wait
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local id = headers:get('x-request-id')
  if not id then return end
  if headers:get('x-envoy-attempt-count') == '1' then young[id], old[id] = nil, nil end
  handle:streamInfo():dynamicMetadata():set('least_wait', 'id', id)
end

function envoy_on_response(handle)
  local headers = handle:headers()
  if headers:get(':status') ~= '429' then return end
  local wait = tonumber(headers:get('retry-after') or '')
  local kept = handle:streamInfo():dynamicMetadata():get('least_wait')
  if not wait or not kept then return end
  local least = young[kept.id] or old[kept.id]
  if least and least < wait then
    wait = least
    headers:replace('retry-after', string.format('%d', wait))
  end
  remember(kept.id, wait)
end
